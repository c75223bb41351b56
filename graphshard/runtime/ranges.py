"""Profiler ranges of the runtime, named as the plan's steps are (`schedule.range_name`).

The only place that asks torch, privately, whether a profiler runs: without one a range costs a
function call, and no name is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from graphshard.schedule.steps import Direction, StepKind, direction_range_name, range_name

NO_RANGE = nullcontext()


def is_profiled() -> bool:
    """A profiler of torch, or emit_nvtx, records this process."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def step_range(kind: StepKind, names: Callable[[], Sequence[str]]) -> AbstractContextManager[Any]:
    """Around step `kind` of the groups `names` (with the places of parameters where split)."""
    return record_function(range_name(kind, names())) if is_profiled() else NO_RANGE


def direction_range(direction: Direction) -> AbstractContextManager[Any]:
    """Around one run of a direction."""
    return record_function(direction_range_name(direction)) if is_profiled() else NO_RANGE
