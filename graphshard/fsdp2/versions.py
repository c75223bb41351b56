"""Which of FSDP2's private names this torch has.

A flag goes by the version, never by looking for the name: a name that moved would otherwise take
the branch for older versions without a word. A flag whose name is gone is False and stands in
`MISSING`, of which the user is told once (`untested`).
"""

from __future__ import annotations

import re
from types import FunctionType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard._version import NEWEST_TORCH

MISSING: list[str] = []


def major_minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"; (0, 0) of what is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


TORCH = major_minor(torch.__version__)


def has_name(owner: type, name: str) -> bool:
    """`owner` defines `name`, or a method of it uses an attribute of that name."""
    methods = [f for f in vars(owner).values() if isinstance(f, FunctionType)]
    return hasattr(owner, name) or any(name in f.__code__.co_names for f in methods)


def _since(version: tuple[int, int], owner: type, *names: str) -> bool:
    gone = [name for name in names if not has_name(owner, name)] if version <= TORCH else []
    MISSING.extend(f"{owner.__name__}.{name}" for name in gone)
    return version <= TORCH and not gone


PARAM_GROUPS_ARE_A_LIST = _since((2, 12), FSDPState, "_fsdp_param_groups")
UNSHARDED_SPEC_IS_KEPT = _since((2, 12), FSDPParam, "_unsharded_dtensor_spec")
# FSDP2 finds inputs that require grad in dataclasses too; what has none stays the same object.
INPUTS_ARE_WALKED = _since((2, 12), FSDPParamGroup, "collect_grad_tensors")
STATE_RESETS_ITSELF = _since((2, 13), FSDPState, "_reset_iter_state")
# `fully_shard([a, b])` casts inputs and outputs of each module, not of the first and the last.
LISTS_CAST_EACH = _since((2, 13), FSDPState, "_force_complete_incomplete_states")
MAY_REDUCE_UNUSED = _since((2, 13), FSDPParamGroup, "reduce_scatter_unused_params")
MAY_REDUCE_APART = _since((2, 13), FSDPModule, "set_separate_reduce_scatter_group")
MAY_CAP_REDUCE_INPUTS = _since((2, 13), FSDPCommContext, "reduce_scatter_max_input_buffers")
MAY_KEEP_STORAGE = _since((2, 15), FSDPModule, "set_keep_unsharded_storage")
# A group may hold gradients of several dtypes; each leaf has its `grad_dtype`.
GRADS_HAVE_DTYPES = _since(
    (2, 15), FSDPParam, "unsharded_grad_dtype", "sharded_grad_dtype"
) and _since((2, 15), FSDPParamGroup, "_get_reduce_dtype", "_reduce_scatter_param_indices")
BACKWARD_MAY_BE_PENDING = _since((2, 15), FSDPParamGroup, "_post_backward_pending")
PARTIAL_GRADS_ARE_BY_PARAM = _since(
    (2, 15), FSDPParamGroup, "_prepare_partial_reduce_output", "_get_partial_reduce_grad"
)


def untested() -> str | None:
    """What the user should know about this torch, or None for one of the tested versions."""
    if TORCH <= NEWEST_TORCH and not MISSING:
        return None
    newest = ".".join(map(str, NEWEST_TORCH))
    gone = f"; FSDP2 there has no {', '.join(MISSING)} any more" if MISSING else ""
    return f"torch {torch.__version__} is newer than {newest}, the newest that was tested{gone}"
