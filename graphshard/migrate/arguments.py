"""FSDP1's arguments in, those of one `fully_shard` call out.

Nothing here touches a module or a process group. What is translated is either the same thing in
FSDP2's words, or a note that says why nothing is needed, or an error that names the replacement.
The table is that of PyTorch's FSDP1-to-FSDP2 guide (the tutorial "Getting Started with FSDP2").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)

from graphshard.errors import MigrateError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# FSDP1 keeps what it gathered until backward; with NO_SHARD there is nothing to free.
KEPT = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """FSDP1's arguments that one sharded module has; a CustomPolicy may change them for each."""

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    device_mesh: DeviceMesh | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One `fully_shard` call without its mesh and `ignored_params`. None: left at the default.

    prefetches: the next group is gathered early in backward. buffer_dtype: of floating buffers.
    """

    reshard_after_forward: bool | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: CPUOffloadPolicy | None = None
    prefetches: bool = True
    buffer_dtype: torch.dtype | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        names = ("reshard_after_forward", "mp_policy", "offload_policy")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def translated(
    arguments: Arguments, device_type: str, *, is_root: bool, apart: bool = False
) -> Call:
    """The `fully_shard` call that FSDP1's `arguments` stand for.

    is_root: FSDP1 casts the inputs of the root and of other modules by two settings. apart: a
    module that FSDP1 leaves out of mixed precision (a batch norm): float32 inside, outputs in the
    model's dtype. Raises MigrateError (GS1002, GS1003).
    """
    check(arguments)
    mixed = arguments.mixed_precision
    offload = arguments.cpu_offload
    return Call(
        # Left out, FSDP2 reshards all but the root, which is what FSDP1's FULL_SHARD does.
        reshard_after_forward=False if arguments.sharding_strategy in KEPT else None,
        mp_policy=None if mixed is None else _mp_policy(mixed, is_root=is_root, apart=apart),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=device_type != "cpu")
            if offload is not None and offload.offload_params
            else None
        ),
        prefetches=arguments.backward_prefetch is not None,
        buffer_dtype=None if mixed is None or apart else mixed.buffer_dtype,
    )


def _mp_policy(mixed: MixedPrecision, *, is_root: bool, apart: bool) -> MixedPrecisionPolicy | None:
    if apart:
        if mixed.param_dtype is None:
            return None
        return MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=mixed.param_dtype)
    if mixed.param_dtype is None and mixed.reduce_dtype is None:
        return None
    return MixedPrecisionPolicy(
        param_dtype=mixed.param_dtype,
        reduce_dtype=mixed.reduce_dtype,
        cast_forward_inputs=casts_inputs(mixed, is_root=is_root),
    )


def casts_inputs(mixed: MixedPrecision, *, is_root: bool) -> bool:
    return mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs


# What each argument has to be, besides None, and what FSDP2's own object is called.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
    "device_id": (int, torch.device),
    "device_mesh": DeviceMesh,
}


def check(arguments: Arguments) -> None:
    """Raises MigrateError: GS1002 for an argument of the wrong type, GS1003 without equivalent."""
    for name, kind in _KINDS.items():
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, kind):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise MigrateError(
                "GS1002",
                f"{name}= takes FSDP1's {wanted}, got {value!r}; FSDP2's own objects go to "
                "fully_shard",
            )
    if arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        raise MigrateError(
            "GS1003",
            "backward_prefetch=BackwardPrefetch.BACKWARD_POST has no equivalent in FSDP2: leave it "
            "out (BACKWARD_PRE), or pass None to gather each group when it is needed. To bound "
            'memory, compile with backend="graphshard", options={"memory_budget": "70GiB"}',
        )
    mixed = arguments.mixed_precision
    if mixed is not None and mixed.keep_low_precision_grads:
        raise MigrateError(
            "GS1003",
            "MixedPrecision(keep_low_precision_grads=True) has no equivalent in FSDP2: gradients "
            "have the dtype of the sharded parameters. Call model.to(torch.bfloat16) before "
            "sharding to have both in bfloat16",
        )


def notes(arguments: Arguments) -> list[str]:
    """What was asked for and needs nothing in FSDP2, each with its reason."""
    said = []
    if arguments.forward_prefetch:
        said.append(
            "forward_prefetch: graphshard plans when each gather is issued; with eager FSDP2, call "
            "set_modules_to_forward_prefetch on each block"
        )
    if not arguments.limit_all_gathers:
        said.append("limit_all_gathers: not needed, FSDP2 never blocks the CPU to save memory")
    if arguments.use_orig_params is False:
        said.append(
            "use_orig_params=False: no equivalent, parameters are always the original ones; group "
            "them for the optimizer as you like"
        )
    if arguments.sharding_strategy is ShardingStrategy.NO_SHARD:
        said.append(
            "NO_SHARD: a mesh whose shard dimension has one rank; DistributedDataParallel does "
            "the same with one copy of the parameters less"
        )
    return said
