"""The rows of the contract: one FSDP2 feature each, set up the same way on eager FSDP2 and on
graphshard. `test_contract.py` runs them; `docs/fsdp2-contract.md` is the table of their results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_models import (
    BRANCHES,
    LLAMA,
    MLPS,
    RAGGED,
    TOWER,
    breaking,
    heads_together,
    lora,
    loss_of_local,
    mesh_of,
    on_full_mesh,
    plain,
    sequence_parallel,
    tensor_parallel,
    train_scaled,
)
from models import CASES, Case
from parity import train
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

HALF, FULL = torch.bfloat16, torch.float32


def nothing(model: nn.Module, step: int) -> None:
    pass


def compile_whole(model: nn.Module, fullgraph: bool = True) -> None:
    model.compile(backend="graphshard", fullgraph=fullgraph, options={"fallback": "error"})


def compile_or_warn(model: nn.Module) -> None:
    model.compile(backend="graphshard")


@dataclass(frozen=True)
class Row:
    """One feature.

    covers: the FSDP2 names that the row is about (`FSDPModule.*` methods, parameters of
    `fully_shard` and of the policies). since: the torch version that brought them. outside: how
    many groups run through eager FSDP2. falls_back: part of the reason that graphshard gives for
    it; empty if the user left them out. fewer_gathers: graphshard gathers less often than FSDP2.
    """

    area: str
    name: str
    shard: Callable[[nn.Module, Ctx], nn.Module] = plain
    before_step: Callable[[nn.Module, int], None] = nothing
    covers: tuple[str, ...] = ()
    case: Case = LLAMA
    ranks: int = 2
    micro_steps: int = 1
    since: tuple[int, int] = (2, 11)
    wrap: Callable[[nn.Module], nn.Module] | None = None
    compile: Callable[[nn.Module], None] = compile_whole
    train: Callable[..., Any] = train
    check: Callable[[nn.Module, bool], None] | None = None
    outside: int = 0
    falls_back: str = ""
    fewer_gathers: bool = False
    needs_cuda: bool = False


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
        self.roots = nn.ModuleList(LLAMA.build() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.roots[0](tokens) + self.roots[1](tokens)


def shared_context(model: nn.Module, ctx: Ctx) -> nn.Module:
    from torch.distributed.fsdp import share_comm_ctx

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


def finalize_by_hand(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    model.set_manual_backward_finalization(True)
    return model


def train_finalized(model: nn.Module, case: Case, ctx: Ctx, steps: int, **kwargs: Any) -> Any:
    """Two backward passes without sync, then one finalization that reduces."""
    run, first = kwargs["run"], kwargs["first_step"]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    from parity import Trace, local

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
        return LLAMA.loss(model, batch)


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


def compile_blocks(model: nn.Module, but: int | None = None) -> None:
    for index, block in enumerate(model.blocks):
        if index != but:
            compile_whole(block)


def _method(*names: str) -> tuple[str, ...]:
    return tuple(f"FSDPModule.{name}" for name in names)


MANUAL, RESHARD, SYNC = "Manual control", "Reshard", "Gradient sync"
REDUCE, PRECISION, MESHES = "Reduction", "Mixed precision", "Offload and meshes"
PARAMETERS, DYNAMIC = "Parameters", "Dynamic"
FP32_REDUCE = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL)

ROWS = [
    Row(
        MANUAL,
        "`unshard()`, `unshard(async_op=True)`, `UnshardHandle.wait()`",
        before_step=unshard_first,
        covers=(*_method("unshard"), "UnshardHandle.wait"),
    ),
    Row(MANUAL, "`reshard()`", before_step=unshard_and_reshard, covers=_method("reshard")),
    Row(
        MANUAL,
        "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`",
        prefetch_two,
        covers=_method("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    ),
    Row(MANUAL, "prefetch lists that change between steps", before_step=toggle_prefetch),
    Row(
        MANUAL,
        "`set_unshard_in_backward(False)`",
        embedding_apart,
        covers=_method("set_unshard_in_backward"),
    ),
    Row(
        MANUAL,
        "`reset_iter_state()` after a failed forward",
        custom_all_gather,
        reset_after_failure,
        covers=_method("reset_iter_state"),
        since=(2, 13),
    ),
    Row(
        MANUAL,
        "`share_comm_ctx`",
        shared_context,
        covers=("share_comm_ctx",),
        case=replace(LLAMA, build=TwoModels),
        compile=compile_roots,
    ),
    Row(
        MANUAL,
        "`set_post_optim_event`",
        before_step=record_event,
        check=event_was_used,
        covers=_method("set_post_optim_event"),
    ),
    Row(RESHARD, "`reshard_after_forward=None`", covers=("fully_shard.reshard_after_forward",)),
    Row(RESHARD, "`reshard_after_forward=True`", partial(plain, reshard_after_forward=True)),
    Row(RESHARD, "`reshard_after_forward=False`", partial(plain, reshard_after_forward=False)),
    Row(
        RESHARD,
        "`reshard_after_forward=2` of 4",
        partial(plain, reshard_after_forward=2),
        ranks=4,
    ),
    Row(
        RESHARD,
        "`set_reshard_after_forward`, with and without `recurse`",
        before_step=toggle_reshard,
        covers=_method("set_reshard_after_forward"),
    ),
    Row(
        RESHARD,
        "`set_reshard_after_backward`, with and without `recurse`",
        before_step=toggle_keep,
        micro_steps=2,
        covers=_method("set_reshard_after_backward"),
    ),
    Row(
        SYNC,
        "`set_requires_gradient_sync`: 4 micro-steps reduce once",
        micro_steps=4,
        covers=_method("set_requires_gradient_sync"),
    ),
    Row(
        SYNC,
        "4 micro-steps, bf16 compute, fp32 reduction",
        partial(plain, mp_policy=FP32_REDUCE),
        micro_steps=4,
    ),
    Row(SYNC, "`set_requires_gradient_sync` of one submodule", before_step=sync_last),
    Row(
        SYNC,
        "`set_is_last_backward`",
        before_step=last_backward,
        micro_steps=2,
        covers=_method("set_is_last_backward"),
    ),
    Row(
        SYNC,
        "`set_requires_all_reduce` with HSDP",
        partial(hybrid, shape=(2, 2)),
        all_reduce_last,
        covers=_method("set_requires_all_reduce"),
        ranks=4,
    ),
    Row(
        REDUCE,
        "`set_gradient_divide_factor`",
        summed("set_gradient_divide_factor", 3.0),
        covers=_method("set_gradient_divide_factor"),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_divide_factor`",
        summed("set_reduce_scatter_divide_factor", 5.0),
        covers=_method("set_reduce_scatter_divide_factor"),
    ),
    Row(
        REDUCE,
        "`set_force_sum_reduction_for_comms`",
        calling("set_force_sum_reduction_for_comms", True),
        covers=_method("set_force_sum_reduction_for_comms"),
    ),
    Row(
        REDUCE,
        "`set_all_reduce_hook`",
        calling("set_all_reduce_hook", lambda output: output.mul_(0.25)),
        covers=_method("set_all_reduce_hook"),
    ),
    Row(
        REDUCE,
        "`set_custom_all_gather`",
        custom_all_gather,
        check=was_called,
        covers=_method("set_custom_all_gather"),
    ),
    Row(
        REDUCE,
        "`set_custom_reduce_scatter`",
        custom_reduce_scatter,
        covers=_method("set_custom_reduce_scatter"),
    ),
    Row(
        REDUCE,
        "`set_allocate_memory_from_process_group_for_comm`",
        calling("set_allocate_memory_from_process_group_for_comm", True),
        covers=_method("set_allocate_memory_from_process_group_for_comm"),
    ),
    Row(
        REDUCE,
        "`set_symm_mem_for_comm`",
        calling("set_symm_mem_for_comm"),
        covers=_method("set_symm_mem_for_comm"),
        since=(2, 13),
        compile=compile_or_warn,
        outside=5,
        falls_back="its buffers are symmetric memory",
        needs_cuda=True,
    ),
    Row(
        REDUCE,
        "`set_separate_reduce_scatter_group`",
        calling("set_separate_reduce_scatter_group", True),
        covers=_method("set_separate_reduce_scatter_group"),
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_max_input_buffers`",
        calling("set_reduce_scatter_max_input_buffers", 2),
        covers=_method("set_reduce_scatter_max_input_buffers"),
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_unused_params`",
        calling("set_reduce_scatter_unused_params", True),
        skip_some,
        covers=_method("set_reduce_scatter_unused_params"),
        case=BRANCHES,
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_keep_unsharded_storage`",
        calling("set_keep_unsharded_storage", True),
        covers=_method("set_keep_unsharded_storage"),
        since=(2, 15),
    ),
    Row(
        REDUCE,
        "`set_manual_backward_finalization`, `finalize_backward`",
        finalize_by_hand,
        covers=_method("set_manual_backward_finalization", "finalize_backward"),
        train=train_finalized,
        since=(2, 15),
    ),
    Row(
        PRECISION,
        "`param_dtype`: bf16 on the wire",
        partial(custom_all_gather, mp_policy=MixedPrecisionPolicy(param_dtype=HALF)),
        check=only_half_on_the_wire,
        covers=("fully_shard.mp_policy", "MixedPrecisionPolicy.param_dtype"),
    ),
    Row(
        PRECISION,
        "`reduce_dtype`",
        policy(param_dtype=HALF, reduce_dtype=FULL),
        covers=("MixedPrecisionPolicy.reduce_dtype",),
    ),
    Row(
        PRECISION,
        "`output_dtype`",
        full_output,
        covers=("MixedPrecisionPolicy.output_dtype",),
    ),
    Row(
        PRECISION,
        "`cast_forward_inputs=False`",
        policy(param_dtype=HALF, cast_forward_inputs=False),
        covers=("MixedPrecisionPolicy.cast_forward_inputs",),
        case=replace(LLAMA, loss=under_autocast),
    ),
    Row(
        PRECISION,
        "`param_dtype_override_fn`",
        override_dtypes,
        covers=("MixedPrecisionPolicy.param_dtype_override_fn",),
        case=replace(LLAMA, loss=under_autocast),
        since=(2, 15),
    ),
    Row(PRECISION, "different policies in different modules", mixed_policies),
    Row(
        PRECISION,
        "fp16 with a gradient scaler",
        policy(param_dtype=torch.float16, reduce_dtype=FULL),
        train=train_scaled,
    ),
    Row(
        PRECISION,
        "`torch.autocast` around the model",
        case=replace(LLAMA, loss=under_autocast),
    ),
    Row(
        MESHES,
        "`CPUOffloadPolicy`",
        offloaded,
        covers=("fully_shard.offload_policy", "CPUOffloadPolicy.pin_memory"),
    ),
    Row(MESHES, "1-D mesh", covers=("fully_shard.mesh", "fully_shard.module")),
    Row(MESHES, "HSDP, 2x2", partial(hybrid, shape=(2, 2)), ranks=4),
    Row(
        MESHES,
        "HSDP, 2x2, bf16 compute, fp32 reduction, 2 micro-steps",
        partial(hybrid, shape=(2, 2), mp_policy=FP32_REDUCE),
        ranks=4,
        micro_steps=2,
    ),
    Row(MESHES, "HSDP, (N, 1)", partial(hybrid, shape=(2, 1))),
    Row(MESHES, "HSDP, (1, N)", partial(hybrid, shape=(1, 2))),
    Row(MESHES, "tensor parallel + FSDP, 2x2", tensor_parallel, case=MLPS, ranks=4),
    Row(
        MESHES,
        "tensor parallel + FSDP, the output a DTensor",
        partial(tensor_parallel, local_output=False),
        case=replace(MLPS, loss=loss_of_local),
        ranks=4,
    ),
    Row(
        MESHES,
        "sequence parallel + FSDP, bf16, 2 micro-steps",
        partial(sequence_parallel, mp_policy=FP32_REDUCE),
        case=MLPS,
        ranks=4,
        micro_steps=2,
    ),
    Row(
        MESHES,
        "`dp_mesh_dims`: shard and tensor parallel",
        partial(on_full_mesh, names=("dp", "tp"), inputs=(Shard(0), Replicate()), shard="dp"),
        covers=("fully_shard.dp_mesh_dims", "DataParallelMeshDims.shard"),
        case=TOWER,
        ranks=4,
        since=(2, 13),
    ),
    Row(
        MESHES,
        "`dp_mesh_dims`: shard and replicate",
        partial(
            on_full_mesh,
            names=("replicas", "dp"),
            inputs=(Shard(0), Shard(0)),
            shard="dp",
            replicate="replicas",
        ),
        covers=("DataParallelMeshDims.replicate",),
        case=TOWER,
        ranks=4,
        since=(2, 13),
    ),
    Row(
        MESHES,
        "`dp_mesh_dims`: two dims flattened",
        partial(on_full_mesh, names=("a", "b"), inputs=(Shard(0), Shard(0)), shard=("a", "b")),
        case=TOWER,
        ranks=4,
        since=(2, 13),
    ),
    Row(
        MESHES,
        "`dp_mesh_dims`: replicate only",
        partial(on_full_mesh, names=("dp",), inputs=(Shard(0),), replicate="dp"),
        case=TOWER,
        since=(2, 13),
    ),
    Row(
        MESHES,
        "a mesh per parameter (`shard_placement_fn`)",
        mesh_per_parameter,
        ranks=4,
        compile=compile_or_warn,
        outside=10,
        falls_back="its parameters use several meshes",
        since=(2, 13),
    ),
    Row(
        MESHES,
        "`DistributedDataParallel` around a model whose blocks are sharded",
        shard_blocks_only,
        wrap=DistributedDataParallel,
        compile=partial(compile_whole, fullgraph=False),
    ),
    Row(
        PARAMETERS,
        "`shard_placement_fn` with `Shard(1)`",
        columns,
        covers=("fully_shard.shard_placement_fn",),
    ),
    Row(PARAMETERS, "`ignored_params`", ignoring, covers=("fully_shard.ignored_params",)),
    Row(
        PARAMETERS,
        "uneven and empty shards",
        case=CASES["convnet"],
        ranks=4,
        shard=lambda model, ctx: CASES["convnet"].shard(model, ctx.mesh),
    ),
    Row(
        PARAMETERS,
        "buffers",
        case=CASES["convnet"],
        shard=lambda model, ctx: CASES["convnet"].shard(model, ctx.mesh),
    ),
    Row(
        PARAMETERS,
        "tied parameters: `fully_shard([embed, head])`",
        case=CASES["gpt_tied"],
        shard=lambda model, ctx: CASES["gpt_tied"].shard(model, ctx.mesh),
    ),
    Row(PARAMETERS, "frozen, and frozen and trainable in one group", frozen_embedding),
    Row(PARAMETERS, "`requires_grad` that flips between steps", before_step=freeze_some),
    Row(PARAMETERS, "LoRA adapters", case=replace(LLAMA, build=lora)),
    Row(PARAMETERS, "fp32 and bf16 parameters", several_dtypes),
    Row(PARAMETERS, "parameters unused in a step", before_step=skip_some, case=BRANCHES),
    Row(
        PARAMETERS,
        "a module called twice in one forward",
        before_step=run_twice,
        case=BRANCHES,
        fewer_gathers=True,
    ),
    Row(
        PARAMETERS,
        "`fully_shard([a, b])`, also when only one of them runs",
        heads_together,
        one_or_both,
        case=BRANCHES,
        since=(2, 13),
    ),
    Row(DYNAMIC, "sequence lengths that differ by step and by rank", case=RAGGED),
    Row(
        DYNAMIC,
        "a graph break inside a block",
        case=breaking("inside"),
        compile=compile_or_warn,
        outside=2,
        falls_back="the graph breaks at",
    ),
    Row(
        DYNAMIC,
        "graph breaks between blocks",
        case=breaking("between"),
        compile=compile_or_warn,
        outside=1,
        falls_back="the graph breaks at",
    ),
    Row(DYNAMIC, "blocks compiled one by one", compile=compile_blocks, outside=1),
    Row(
        DYNAMIC,
        "a block left uncompiled",
        compile=partial(compile_blocks, but=1),
        outside=2,
    ),
]
