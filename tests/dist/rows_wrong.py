"""Rows of the contract about what eager FSDP2 gets wrong. The oracle is the model without FSDP2, or
with a setting that it gets right."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from contract_loop import sgd
from contract_models import CHAIN, MLPS, Chain, plain, tensor_parallel
from contract_row import Row
from models import DIM, Case
from parity import Trace, local
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

ALL_RANKS = "`reshard_after_forward=True`"


class Flattening(nn.Module):
    """Works on rows and returns them as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * DIM - 1), nn.Linear(3 * DIM - 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.flatten(0, 1)))).view(x.shape)


def add_in_place(block: nn.Module, x: Tensor) -> Tensor:
    """The residual. In eager FSDP2 it cuts off the hook that gathers the block in backward."""
    y = block(x)
    y += x
    return y


def as_it_is(model: nn.Module, ctx: Ctx) -> nn.Module:
    return model


def only_the_head_trains(model: nn.Module, ctx: Ctx) -> nn.Module:
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def list_across(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Eager FSDP2 takes the list for complete when the block is, and gathers it again for the head,
    for a forward that never ends: the optimizer sees no gradient."""
    only_the_head_trains(model, ctx)
    block = model.blocks[-1]
    fully_shard([block.down, model.head], mesh=ctx.mesh)
    for module in (model.embed, *model.blocks):
        fully_shard(module, mesh=ctx.mesh)
    return model


def columns(model: nn.Module, ctx: Ctx, reshard: int | bool) -> nn.Module:
    """Eager FSDP2 raises an IndexError when it gathers columns from a smaller group."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % ctx.world_size == 0 else None

    return plain(model, ctx, shard_placement_fn=placement, reshard_after_forward=reshard)


def train_whole(model: nn.Module, case: Case, ctx: Ctx, steps: int, **kwargs: Any) -> Trace:
    """Whole gradients and parameters. A model without FSDP2 averages its gradients by hand, which
    on two ranks gives the same bits."""
    run, first = kwargs["run"], kwargs["first_step"]
    optim = sgd(model.parameters())
    trace = Trace()
    for step in range(first, first + steps):
        loss = run(case.batch(step, ctx.rank, ctx.device))
        loss.backward()
        for param in model.parameters():
            if param.grad is not None and not isinstance(param, DTensor):
                dist.all_reduce(param.grad)
                param.grad /= ctx.world_size
        trace.losses.append(loss.detach().clone())
        trace.grads.append({n: whole(p.grad) for n, p in model.named_parameters()})
        optim.step()
        optim.zero_grad()
    trace.params.update((n, whole(p)) for n, p in model.named_parameters())
    return trace


def whole(tensor: Tensor) -> Tensor | None:
    return local(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


ROWS = (
    Row(
        "What eager FSDP2 gets wrong",
        "a block that returns a view, which is then added to in place",
        case=replace(CHAIN, build=partial(Chain, visit=add_in_place, wrap=lambda _: Flattening())),
        train=train_whole,
        whole=as_it_is,
    ),
    Row(
        "What eager FSDP2 gets wrong",
        "`fully_shard([a, b])` where no sharded module holds both, and only `b` trains",
        case=CHAIN,
        shard=list_across,
        train=train_whole,
        whole=only_the_head_trains,
    ),
    Row(
        "What eager FSDP2 gets wrong",
        "`reshard_after_forward=2` of 4 with `shard_placement_fn`: `Shard(1)`",
        partial(columns, reshard=2),
        ranks=4,
        micro_steps=2,
        whole=partial(columns, reshard=True),
        compared_with=ALL_RANKS,
    ),
    Row(
        "What eager FSDP2 gets wrong",
        "`reshard_after_forward=2` of 4 with tensor parallel",
        # It raises NotImplementedError after forward.
        partial(tensor_parallel, shape=(4, 1), reshard_after_forward=2),
        case=MLPS,
        ranks=4,
        whole=partial(tensor_parallel, shape=(4, 1), reshard_after_forward=True),
        compared_with=ALL_RANKS,
    ),
)
