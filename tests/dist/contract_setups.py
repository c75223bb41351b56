"""How the rows of the contract set FSDP2 up, change it before a step, compile and train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_models import GATED, mesh_of, plain
from models import Case
from parity import Trace, local
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    share_comm_ctx,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from graphshard.capture.root_state import handle_of

HALF, FULL = torch.bfloat16, torch.float32


def nothing(model: nn.Module, step: int) -> None:
    pass


# Rows count collectives: FSDP2's own order has as many.
OWN_ORDER: dict[str, Any] = {"schedule": "fsdp2"}
STRICT: dict[str, Any] = {**OWN_ORDER, "fallback": "error"}


def compile_whole(model: nn.Module, fullgraph: bool = True, **options: Any) -> None:
    model.compile(backend="graphshard", fullgraph=fullgraph, options={**STRICT, **options})


def compile_or_warn(model: nn.Module) -> None:
    model.compile(backend="graphshard", options=OWN_ORDER)


def calling(name: str, *args: Any, **kwargs: Any) -> Callable[[nn.Module, Ctx], nn.Module]:
    """Plain sharding, then `.<name>(...)` on every FSDP module that has it."""

    def shard(model: nn.Module, ctx: Ctx) -> nn.Module:
        plain(model, ctx)
        for module in (model, *model.blocks):
            getattr(module, name)(*args, **kwargs)
        return model

    return shard


# -- manual control ------------------------------------------------------------------------------


def unshard_first(model: nn.Module, step: int) -> None:
    if step % 2:
        model.unshard()
        model.blocks[1].unshard()
    else:
        handle = model.blocks[0].unshard(async_op=True)
        if step % 4 and handle is not None:
            handle.wait()


def unshard_and_reshard(model: nn.Module, step: int) -> None:
    model.blocks[0].unshard()
    model.blocks[0].reshard()


def prefetch_two(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    return model


def toggle_prefetch(model: nn.Module, step: int) -> None:
    model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks[1 : 1 + step % 3]))


def embedding_apart(model: nn.Module, ctx: Ctx) -> nn.Module:
    fully_shard(model.embed, mesh=ctx.mesh)
    plain(model, ctx)
    model.embed.set_unshard_in_backward(False)
    return model


def reset_after_failure(model: nn.Module, step: int) -> None:
    if step != 1:
        return
    tokens = torch.zeros(2, 12, dtype=torch.long, device=next(model.parameters()).device)
    model.log.countdown = 2
    with pytest.raises(ZeroDivisionError):
        model(tokens)
    model.reset_iter_state()


class TwoModels(nn.Module):
    """Two FSDP roots with one communication context, trained in one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.roots = nn.ModuleList(GATED.build() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.roots[0](tokens) + self.roots[1](tokens)


def shared_context(model: nn.Module, ctx: Ctx) -> nn.Module:
    for root in model.roots:
        plain(root, ctx)
    share_comm_ctx(list(model.roots))
    return model


def compile_roots(model: nn.Module) -> None:
    for root in model.roots:
        compile_whole(root)


def record_event(model: nn.Module, step: int) -> None:
    device = next(model.parameters()).device
    event = torch.cuda.Event() if device.type == "cuda" else torch.cpu.Event()
    event.record()
    model.set_post_optim_event(event)


def event_was_used(model: nn.Module, compiled: bool) -> None:
    assert model._get_fsdp_state()._state_ctx.post_optim_event is None


# -- resharding and synchronisation --------------------------------------------------------------


def toggle_reshard(model: nn.Module, step: int) -> None:
    model.set_reshard_after_forward(step % 2 == 0)
    model.blocks[0].set_reshard_after_forward(True, recurse=False)


def toggle_keep(model: nn.Module, step: int) -> None:
    model.set_reshard_after_backward(step % 2 == 1)
    model.blocks[0].set_reshard_after_backward(True, recurse=False)


def sync_last(model: nn.Module, step: int) -> None:
    model.set_requires_gradient_sync(step % 2 == 1)
    model.blocks[1].set_requires_gradient_sync(True, recurse=False)


def last_backward(model: nn.Module, step: int) -> None:
    model.set_is_last_backward(step % 2 == 1)


def all_reduce_last(model: nn.Module, step: int) -> None:
    model.set_requires_all_reduce(step % 2 == 1)
    model.blocks[0].set_requires_all_reduce(step % 2 == 1, recurse=False)


# -- reduction -----------------------------------------------------------------------------------


def summed(name: str, factor: float) -> Callable[[nn.Module, Ctx], nn.Module]:
    """A divide factor; sums only, because gloo has no pre-multiplied sum."""

    def shard(model: nn.Module, ctx: Ctx) -> nn.Module:
        plain(model, ctx)
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            getattr(module, name)(factor)
        return model

    return shard


class LoggedAllGather:
    """A user's all-gather: allocates and communicates itself, notes dtypes, fails if told to."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []
        self.countdown = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.dtypes.append(input_tensor.dtype)
        self.countdown -= 1
        if self.countdown == 0:
            raise ZeroDivisionError
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class HalvingReduceScatter:
    """A user's reduce-scatter that does something of its own, synchronously."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output_tensor, input_tensor, op=op, group=group)
        output_tensor.mul_(0.5)
        return None


def custom_all_gather(model: nn.Module, ctx: Ctx, **kwargs: Any) -> nn.Module:
    plain(model, ctx, **kwargs)
    model.log = LoggedAllGather()
    for module in (model, *model.blocks):
        module.set_custom_all_gather(model.log)
    return model


def was_called(model: nn.Module, compiled: bool) -> None:
    assert model.log.dtypes


def only_half_on_the_wire(model: nn.Module, compiled: bool) -> None:
    assert set(model.log.dtypes) == {HALF}


def custom_reduce_scatter(model: nn.Module, ctx: Ctx) -> nn.Module:
    return calling("set_custom_reduce_scatter", HalvingReduceScatter())(model, ctx)


def storage_is_kept(model: nn.Module, compiled: bool) -> None:
    for block in model.blocks:
        lives = handle_of(block).lives if compiled else ()
        for live in lives:
            assert any(s.nbytes() for r in live.buffers.values() for s in r.storages)


def finalize_by_hand(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    model.set_manual_backward_finalization(True)
    return model


def train_finalized(model: nn.Module, case: Case, ctx: Ctx, steps: int, **kwargs: Any) -> Any:
    """Two backward passes without sync, then one finalization that reduces."""
    run, first = kwargs["run"], kwargs["first_step"]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    for step in range(first, first + steps):
        model.set_requires_gradient_sync(False)
        for micro in range(2):
            loss = run(case.batch(2 * step + micro, ctx.rank, ctx.device))
            loss.backward()
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=step % 2 == 1)
        if handle is not None:
            handle.wait()
        trace.losses.append(loss.detach().clone())
        trace.grads.append({n: local(p.grad) for n, p in model.named_parameters()})
        optim.step()
        optim.zero_grad()
    trace.params.update((n, local(p)) for n, p in model.named_parameters())
    return trace


# -- precision, offload, meshes ------------------------------------------------------------------


def policy(**kwargs: Any) -> Callable[[nn.Module, Ctx], nn.Module]:
    return partial(plain, mp_policy=MixedPrecisionPolicy(**kwargs))


def mixed_policies(model: nn.Module, ctx: Ctx) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL)
    back = MixedPrecisionPolicy(param_dtype=HALF, output_dtype=FULL)
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=ctx.mesh, mp_policy=back if index % 2 else half)
    return fully_shard(model, mesh=ctx.mesh)


def full_output(model: nn.Module, ctx: Ctx) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=HALF)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, mp_policy=half)
    whole = MixedPrecisionPolicy(param_dtype=HALF, output_dtype=FULL)
    return fully_shard(model, mesh=ctx.mesh, mp_policy=whole)


def norms_in_full(param: nn.Parameter) -> torch.dtype | None:
    return FULL if param.ndim == 1 else None


def override_dtypes(model: nn.Module, ctx: Ctx) -> nn.Module:
    keep = MixedPrecisionPolicy(param_dtype=HALF, param_dtype_override_fn=norms_in_full)
    return plain(model, ctx, mp_policy=keep)


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast(batch[0].device.type, dtype=HALF):
        return GATED.loss(model, batch)


def hybrid(model: nn.Module, ctx: Ctx, shape: tuple[int, int], **kwargs: Any) -> nn.Module:
    return plain(model, ctx, mesh=mesh_of(ctx, shape, "replicate", "shard"), **kwargs)


def offloaded(model: nn.Module, ctx: Ctx) -> nn.Module:
    pinned = ctx.device.type != "cpu"  # a machine without accelerator has no pinned memory
    return plain(model, ctx, offload_policy=CPUOffloadPolicy(pin_memory=pinned))


def mesh_per_parameter(model: nn.Module, ctx: Ctx) -> nn.Module:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    info = FSDPMeshInfo(ctx.mesh, shard_mesh_dim=0)
    other = FSDPMeshInfo(mesh_of(ctx, (2, 2), "outer", "inner")["inner"], shard_mesh_dim=0)

    def placement(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), other if param.ndim == 1 else info)

    return plain(model, ctx, shard_placement_fn=placement)


def shard_blocks_only(model: nn.Module, ctx: Ctx) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


# -- parameters and dynamic behaviour ------------------------------------------------------------


def columns(model: nn.Module, ctx: Ctx) -> nn.Module:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % ctx.world_size == 0 else None

    return plain(model, ctx, shard_placement_fn=placement)


def ignoring(model: nn.Module, ctx: Ctx) -> nn.Module:
    skipped = {model.blocks[0].norm1.weight, model.norm.weight}
    return plain(model, ctx, ignored_params=skipped)


def freeze_some(model: nn.Module, step: int) -> None:
    model.blocks[0].gate.weight.requires_grad_(step % 2 == 0)


def frozen_embedding(model: nn.Module, ctx: Ctx) -> nn.Module:
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].gate.requires_grad_(False)
    return plain(model, ctx)


def several_dtypes(model: nn.Module, ctx: Ctx) -> nn.Module:
    model.blocks[1].to(HALF)
    model.blocks[0].gate.to(HALF).requires_grad_(False)
    return plain(model, ctx, mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL))


def skip_some(model: nn.Module, step: int) -> None:
    model.skipped = step % 2


def run_twice(model: nn.Module, step: int) -> None:
    model.twice = 1


def one_or_both(model: nn.Module, step: int) -> None:
    model.both = step % 2 == 0


def compile_blocks(model: nn.Module, but: int | None = None, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        if index != but:
            compile_whole(block, **options)
