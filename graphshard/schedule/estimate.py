"""What the cost model says of a plan: time, memory by category, and the same of FSDP2's schedule.

Plain values with a JSON form; in the plan file an `Estimate` is what `dataclasses.asdict` gives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from graphshard.files.decode import Amount, Count
from graphshard.schedule.steps import Direction


class Category(StrEnum):
    """What bytes are for. Named as in torch.distributed._tools.fsdp2_mem_tracker (torch 2.13)."""

    SHARDED_PARAM = "Sharded Param"
    SHARDED_GRAD = "Sharded Grad"
    OPT_STATE = "OptState"
    UNSHARDED_PARAM = "Unsharded Param"
    UNSHARDED_GRAD = "Unsharded Grad"
    ALL_GATHER = "All Gather"
    REDUCE_SCATTER = "Reduce Scatter"
    ACTIVATION = "Activation"
    TEMP = "Temp"
    BUFFER = "Buffer"
    INPUTS = "Inputs"


@dataclass(frozen=True, slots=True)
class Moment:
    """During step `step` of the schedule of `direction`."""

    direction: Direction
    step: Count


@dataclass(frozen=True, slots=True)
class Allocation:
    """`bytes` of memory held for `category`; group: a GroupInfo.id, or None for the whole model."""

    category: Category
    bytes: int
    group: Count | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What the cost model says of one step (all micro-steps) on one rank.

    exposed_us: compute waits so long for communication. peak_by_category and peak_owners add up to
    peak_bytes, largest first; peak_at: the first moment of the peak.
    """

    step_time_us: Amount
    exposed_us: Amount
    peak_bytes: Count
    peak_by_category: tuple[tuple[Category, int], ...] = ()
    peak_owners: tuple[Allocation, ...] = ()
    peak_at: Moment | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The figures of the plan and of FSDP2's own schedule, both of the same graph.

    lower_bound_us: no schedule of this graph is faster, whatever its memory.
    """

    ours: Figures
    fsdp2: Figures
    budget_bytes: Count
    lower_bound_us: Amount

    @property
    def step_time_us(self) -> float:
        return self.ours.step_time_us

    @property
    def exposed_us(self) -> float:
        return self.ours.exposed_us

    @property
    def peak_bytes(self) -> int:
        return self.ours.peak_bytes

    @property
    def gap(self) -> float:
        """How far the step may be from the best possible, as a share of the lower bound."""
        bound = self.lower_bound_us
        return (self.step_time_us - bound) / bound if bound else 0.0


def estimate_summary(estimate: Estimate) -> dict[str, Any]:
    """One flat dict, as in `Plan.summary()`; FSDP2's figures under `fsdp2`."""
    return {
        **_figures_to_dict(estimate.ours),
        "budget_bytes": estimate.budget_bytes,
        "lower_bound_us": estimate.lower_bound_us,
        "gap": estimate.gap,
        "fsdp2": _figures_to_dict(estimate.fsdp2),
    }


def _figures_to_dict(figures: Figures) -> dict[str, Any]:
    """Without the owners of the peak, which are as many as there are groups."""
    found = {**asdict(figures), "peak_by_category": dict(figures.peak_by_category)}
    del found["peak_owners"], found["peak_at"]
    return found
