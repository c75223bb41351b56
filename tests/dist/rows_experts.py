"""Rows of the contract about mixtures of experts: experts on one mesh, all else on another."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from contract_models import mesh_of
from contract_row import Row
from models import DIM, VOCAB, Case, RMSNorm, text_batch, token_loss
from pool import Ctx
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

AREA = "Mixture of experts"
EXPERTS, CHOSEN, HIDDEN = 4, 3, 2 * DIM


class Experts(nn.Module):
    """Each expert chooses its tokens; over the mesh `parallel` each rank has some of the experts.

    There a rank sends the tokens of all experts to the ranks that have them, and gets them back.
    """

    parallel: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """From [EXPERTS, CHOSEN, DIM] to the same."""
        up, down = local(self.up), local(self.down)
        if self.parallel is None:
            return (tokens @ up).relu() @ down
        ranks = self.parallel.size()
        sent = self._exchange(tokens).unflatten(0, (ranks, EXPERTS // ranks))
        made = (sent.transpose(0, 1).flatten(1, 2) @ up).relu() @ down
        return self._exchange(made.unflatten(1, (ranks, CHOSEN)).transpose(0, 1).flatten(0, 1))

    def _exchange(self, tokens: Tensor) -> Tensor:
        flat = all_to_all_single_autograd(tokens.contiguous(), None, None, self.parallel)
        return flat.view_as(tokens)


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        scores, chosen = self.router(h).softmax(-1).T.topk(CHOSEN)
        made = self.experts(h[chosen]) * scores.unsqueeze(-1)
        return x + torch.zeros_like(h).index_add(0, chosen.flatten(), made.flatten(0, 1)).view_as(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def expert_parallel(model: nn.Module, ctx: Ctx, **kwargs: Any) -> nn.Module:
    """As torchtitan does it: experts are split over "ep" and sharded over "efsdp"; all else is
    sharded over all ranks. No gradient is divided."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = mesh_of(ctx, (2, 2), "efsdp", "ep")
    of_experts, of_others = FSDPMeshInfo(mesh["efsdp"], 0), FSDPMeshInfo(ctx.mesh, 0)

    def placement(param: nn.Parameter) -> Any:
        if isinstance(param, DTensor):
            return ShardPlacementResult(Shard(1), of_experts)
        return ShardPlacementResult(Shard(0), of_others)

    for block in model.blocks:
        experts = block.experts
        experts.parallel = mesh["ep"]
        for name, param in list(experts.named_parameters()):
            split = distribute_tensor(param.data, mesh["ep"], [Shard(0)])
            experts.register_parameter(name, nn.Parameter(split))
        fully_shard(block, mesh=ctx.mesh, shard_placement_fn=placement, **kwargs)
    fully_shard(model, mesh=ctx.mesh, **kwargs)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo sums only
    return model


def prefetching(model: nn.Module, ctx: Ctx) -> nn.Module:
    """With the lists that torchtitan sets."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expert_parallel(model, ctx, mp_policy=half)
    blocks = list(model.blocks)
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return model


def one_mesh_each(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Experts replicated over nodes and sharded in each (HSDP), all else sharded over all ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    hybrid = HSDPMeshInfo(mesh_of(ctx, (2, 2), "replicate", "shard"), 1, 0)
    flat = FSDPMeshInfo(ctx.mesh, 0)
    for block in model.blocks:
        experts = set(block.experts.parameters())

        def placement(param: nn.Parameter, experts: set[Any] = experts) -> Any:
            return ShardPlacementResult(None, hybrid if param in experts else flat)

        fully_shard(block, mesh=ctx.mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=ctx.mesh)


SPARSE = Case("sparse", Sparse, expert_parallel, text_batch, token_loss)
sparse = partial(Row, AREA, case=SPARSE, ranks=4, since=(2, 13), counts_bytes=True)
ROWS = (
    sparse(
        "experts on a mesh of their own (`shard_placement_fn`), with expert parallel",
        expert_parallel,
    ),
    sparse("the same in bfloat16, with prefetch lists", prefetching),
    sparse("experts with HSDP, all else with FSDP, in one `fully_shard`", one_mesh_each),
)
