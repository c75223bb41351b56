"""The rows of the contract: one FSDP2 feature each, set up the same way on eager FSDP2 and on
graphshard. `test_contract.py` runs them; `docs/fsdp2-contract.md` is the table of their results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import contract_setups as do
import torch
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
    on_full_mesh,
    plain,
    sequence_parallel,
    tensor_parallel,
    train_scaled,
)
from contract_setups import FULL, HALF
from models import CASES, Case
from parity import train
from pool import Ctx
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel


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
    before_step: Callable[[nn.Module, int], None] = do.nothing
    covers: tuple[str, ...] = ()
    case: Case = LLAMA
    ranks: int = 2
    micro_steps: int = 1
    since: tuple[int, int] = (2, 11)
    wrap: Callable[[nn.Module], nn.Module] | None = None
    compile: Callable[[nn.Module], None] = do.compile_whole
    train: Callable[..., Any] = train
    check: Callable[[nn.Module, bool], None] | None = None
    outside: int = 0
    falls_back: str = ""
    fewer_gathers: bool = False
    needs_cuda: bool = False


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
        before_step=do.unshard_first,
        covers=(*_method("unshard"), "UnshardHandle.wait"),
    ),
    Row(MANUAL, "`reshard()`", before_step=do.unshard_and_reshard, covers=_method("reshard")),
    Row(
        MANUAL,
        "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`",
        do.prefetch_two,
        covers=_method("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    ),
    Row(MANUAL, "prefetch lists that change between steps", before_step=do.toggle_prefetch),
    Row(
        MANUAL,
        "`set_unshard_in_backward(False)`",
        do.embedding_apart,
        covers=_method("set_unshard_in_backward"),
    ),
    Row(
        MANUAL,
        "`reset_iter_state()` after a failed forward",
        do.custom_all_gather,
        do.reset_after_failure,
        covers=_method("reset_iter_state"),
        since=(2, 13),
    ),
    Row(
        MANUAL,
        "`share_comm_ctx`",
        do.shared_context,
        covers=("share_comm_ctx",),
        case=replace(LLAMA, build=do.TwoModels),
        compile=do.compile_roots,
    ),
    Row(
        MANUAL,
        "`set_post_optim_event`",
        before_step=do.record_event,
        check=do.event_was_used,
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
        before_step=do.toggle_reshard,
        covers=_method("set_reshard_after_forward"),
    ),
    Row(
        RESHARD,
        "`set_reshard_after_backward`, with and without `recurse`",
        before_step=do.toggle_keep,
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
    Row(SYNC, "`set_requires_gradient_sync` of one submodule", before_step=do.sync_last),
    Row(
        SYNC,
        "`set_is_last_backward`",
        before_step=do.last_backward,
        micro_steps=2,
        covers=_method("set_is_last_backward"),
    ),
    Row(
        SYNC,
        "`set_requires_all_reduce` with HSDP",
        partial(do.hybrid, shape=(2, 2)),
        do.all_reduce_last,
        covers=_method("set_requires_all_reduce"),
        ranks=4,
    ),
    Row(
        REDUCE,
        "`set_gradient_divide_factor`",
        do.summed("set_gradient_divide_factor", 3.0),
        covers=_method("set_gradient_divide_factor"),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_divide_factor`",
        do.summed("set_reduce_scatter_divide_factor", 5.0),
        covers=_method("set_reduce_scatter_divide_factor"),
    ),
    Row(
        REDUCE,
        "`set_force_sum_reduction_for_comms`",
        do.calling("set_force_sum_reduction_for_comms", True),
        covers=_method("set_force_sum_reduction_for_comms"),
    ),
    Row(
        REDUCE,
        "`set_all_reduce_hook`",
        do.calling("set_all_reduce_hook", lambda output: output.mul_(0.25)),
        covers=_method("set_all_reduce_hook"),
    ),
    Row(
        REDUCE,
        "`set_custom_all_gather`",
        do.custom_all_gather,
        check=do.was_called,
        covers=_method("set_custom_all_gather"),
    ),
    Row(
        REDUCE,
        "`set_custom_reduce_scatter`",
        do.custom_reduce_scatter,
        covers=_method("set_custom_reduce_scatter"),
    ),
    Row(
        REDUCE,
        "`set_allocate_memory_from_process_group_for_comm`",
        do.calling("set_allocate_memory_from_process_group_for_comm", True),
        covers=_method("set_allocate_memory_from_process_group_for_comm"),
    ),
    Row(
        REDUCE,
        "`set_symm_mem_for_comm`",
        do.calling("set_symm_mem_for_comm"),
        covers=_method("set_symm_mem_for_comm"),
        since=(2, 13),
        compile=do.compile_or_warn,
        outside=5,
        falls_back="its buffers are symmetric memory",
        needs_cuda=True,
    ),
    Row(
        REDUCE,
        "`set_separate_reduce_scatter_group`",
        do.calling("set_separate_reduce_scatter_group", True),
        covers=_method("set_separate_reduce_scatter_group"),
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_max_input_buffers`",
        do.calling("set_reduce_scatter_max_input_buffers", 2),
        covers=_method("set_reduce_scatter_max_input_buffers"),
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_reduce_scatter_unused_params`",
        do.calling("set_reduce_scatter_unused_params", True),
        do.skip_some,
        covers=_method("set_reduce_scatter_unused_params"),
        case=BRANCHES,
        since=(2, 13),
    ),
    Row(
        REDUCE,
        "`set_keep_unsharded_storage`",
        do.calling("set_keep_unsharded_storage", True),
        check=do.storage_is_kept,
        covers=_method("set_keep_unsharded_storage"),
        since=(2, 15),
    ),
    Row(
        REDUCE,
        "`set_manual_backward_finalization`, `finalize_backward`",
        do.finalize_by_hand,
        covers=_method("set_manual_backward_finalization", "finalize_backward"),
        train=do.train_finalized,
        since=(2, 15),
    ),
    Row(
        PRECISION,
        "`param_dtype`: bf16 on the wire",
        partial(do.custom_all_gather, mp_policy=MixedPrecisionPolicy(param_dtype=HALF)),
        check=do.only_half_on_the_wire,
        covers=("fully_shard.mp_policy", "MixedPrecisionPolicy.param_dtype"),
    ),
    Row(
        PRECISION,
        "`reduce_dtype`",
        do.policy(param_dtype=HALF, reduce_dtype=FULL),
        covers=("MixedPrecisionPolicy.reduce_dtype",),
    ),
    Row(
        PRECISION,
        "`output_dtype`",
        do.full_output,
        covers=("MixedPrecisionPolicy.output_dtype",),
    ),
    Row(
        PRECISION,
        "`cast_forward_inputs=False`",
        do.policy(param_dtype=HALF, cast_forward_inputs=False),
        covers=("MixedPrecisionPolicy.cast_forward_inputs",),
        case=replace(LLAMA, loss=do.under_autocast),
    ),
    Row(
        PRECISION,
        "`param_dtype_override_fn`",
        do.override_dtypes,
        covers=("MixedPrecisionPolicy.param_dtype_override_fn",),
        case=replace(LLAMA, loss=do.under_autocast),
        since=(2, 15),
    ),
    Row(PRECISION, "different policies in different modules", do.mixed_policies),
    Row(
        PRECISION,
        "fp16 with a gradient scaler",
        do.policy(param_dtype=torch.float16, reduce_dtype=FULL),
        train=train_scaled,
    ),
    Row(
        PRECISION,
        "`torch.autocast` around the model",
        case=replace(LLAMA, loss=do.under_autocast),
    ),
    Row(
        MESHES,
        "`CPUOffloadPolicy`",
        do.offloaded,
        covers=("fully_shard.offload_policy", "CPUOffloadPolicy.pin_memory"),
    ),
    Row(MESHES, "1-D mesh", covers=("fully_shard.mesh", "fully_shard.module")),
    Row(MESHES, "HSDP, 2x2", partial(do.hybrid, shape=(2, 2)), ranks=4),
    Row(
        MESHES,
        "HSDP, 2x2, bf16 compute, fp32 reduction, 2 micro-steps",
        partial(do.hybrid, shape=(2, 2), mp_policy=FP32_REDUCE),
        ranks=4,
        micro_steps=2,
    ),
    Row(MESHES, "HSDP, (N, 1)", partial(do.hybrid, shape=(2, 1))),
    Row(MESHES, "HSDP, (1, N)", partial(do.hybrid, shape=(1, 2))),
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
        do.mesh_per_parameter,
        ranks=4,
        compile=do.compile_or_warn,
        outside=10,
        falls_back="its parameters use several meshes",
        since=(2, 13),
    ),
    Row(
        MESHES,
        "`DistributedDataParallel` around a model whose blocks are sharded",
        do.shard_blocks_only,
        wrap=DistributedDataParallel,
        compile=partial(do.compile_whole, fullgraph=False),
    ),
    Row(
        PARAMETERS,
        "`shard_placement_fn` with `Shard(1)`",
        do.columns,
        covers=("fully_shard.shard_placement_fn",),
    ),
    Row(PARAMETERS, "`ignored_params`", do.ignoring, covers=("fully_shard.ignored_params",)),
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
    Row(PARAMETERS, "frozen, and frozen and trainable in one group", do.frozen_embedding),
    Row(PARAMETERS, "`requires_grad` that flips between steps", before_step=do.freeze_some),
    Row(PARAMETERS, "LoRA adapters", case=replace(LLAMA, build=lora)),
    Row(PARAMETERS, "fp32 and bf16 parameters", do.several_dtypes),
    Row(PARAMETERS, "parameters unused in a step", before_step=do.skip_some, case=BRANCHES),
    Row(
        PARAMETERS,
        "a module called twice in one forward",
        before_step=do.run_twice,
        case=BRANCHES,
        fewer_gathers=True,
    ),
    Row(
        PARAMETERS,
        "`fully_shard([a, b])`, also when only one of them runs",
        heads_together,
        do.one_or_both,
        case=BRANCHES,
        since=(2, 13),
    ),
    Row(DYNAMIC, "sequence lengths that differ by step and by rank", case=RAGGED),
    Row(
        DYNAMIC,
        "a graph break inside a block",
        case=breaking("inside"),
        compile=do.compile_or_warn,
        outside=2,
        falls_back="the graph breaks",
    ),
    Row(
        DYNAMIC,
        "graph breaks between blocks",
        case=breaking("between"),
        compile=do.compile_or_warn,
        outside=1,
        falls_back="the graph breaks",
    ),
    Row(DYNAMIC, "blocks compiled one by one", compile=do.compile_blocks, outside=1),
    Row(
        DYNAMIC,
        "a block left uncompiled",
        compile=partial(do.compile_blocks, but=1),
        outside=2,
    ),
]
