"""What the cost model says of a plan: time, memory by category, and the same of FSDP2's schedule.

Plain values with a JSON form; in the plan file an `Estimate` is what `dataclasses.asdict` gives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from graphshard.files.decode import Amount, Count, Positive
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


class OptimizerKind(StrEnum):
    """As the option `optimizer` names them. ADAMW, SGD: foreach, torch's default on a GPU."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw_fused"
    ADAMW_8BIT = "adamw_8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd_momentum"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What follows backward once per step, whatever the schedule: the optimizer on this rank's
    shards, and the gradients clipped before, if `clips`."""

    kind: OptimizerKind
    clips: bool
    us: Amount


@dataclass(frozen=True, slots=True)
class Stragglers:
    """`ranks` wait for the slowest of them; their compute times have a standard deviation of
    `spread`, as a share of the mean. So the plan's step is `ours_us` longer, FSDP2's `fsdp2_us`."""

    ranks: Positive
    spread: Amount
    ours_us: Amount
    fsdp2_us: Amount


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
    """What the cost model says of forward and backward of one step (all micro-steps) on one rank.

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
class Rung:
    """The same step planned with a budget of `budget_bytes`: forward and backward of it, and its
    peak."""

    budget_bytes: Count
    step_time_us: Amount
    peak_bytes: Count


@dataclass(frozen=True, slots=True)
class Estimate:
    """The figures of the plan and of FSDP2's own schedule, both of the same graph.

    lower_bound_us: no forward and backward of this graph is faster, whatever its memory. optimizer:
    None where the graph does not train, and for what was planned before it was priced. stragglers:
    expected on top of all other figures, which are of ranks that are all alike; None: not known.
    room: what larger budgets would give; empty: nobody asked.

    Plans are made, and measured, by forward and backward (`step_time_us`); people wait for the
    optimizer too (`whole_step_us`).
    """

    ours: Figures
    fsdp2: Figures
    budget_bytes: Count
    lower_bound_us: Amount
    optimizer: OptimizerStep | None = None
    stragglers: Stragglers | None = None
    room: tuple[Rung, ...] = ()

    @property
    def step_time_us(self) -> float:
        return self.ours.step_time_us

    @property
    def optimizer_us(self) -> float:
        return 0.0 if self.optimizer is None else self.optimizer.us

    @property
    def whole_step_us(self) -> float:
        return self.ours.step_time_us + self.optimizer_us

    @property
    def whole_fsdp2_us(self) -> float:
        return self.fsdp2.step_time_us + self.optimizer_us

    @property
    def whole_bound_us(self) -> float:
        return self.lower_bound_us + self.optimizer_us

    @property
    def exposed_us(self) -> float:
        return self.ours.exposed_us

    @property
    def peak_bytes(self) -> int:
        return self.ours.peak_bytes

    @property
    def has_budget(self) -> bool:
        """A budget was set; else FSDP2's own peak is the limit."""
        return self.budget_bytes != self.fsdp2.peak_bytes

    @property
    def gap(self) -> float:
        """How far the whole step may be from the best possible, as a share of that."""
        bound = self.whole_bound_us
        return (self.whole_step_us - bound) / bound if bound else 0.0


def estimate_summary(estimate: Estimate) -> dict[str, Any]:
    """One flat dict, as in `Plan.summary()`; FSDP2's figures under `fsdp2`. Step times are of
    forward and backward, `whole_step_us` is with the optimizer."""
    return {
        **_figures_to_dict(estimate.ours),
        "budget_bytes": estimate.budget_bytes,
        "lower_bound_us": estimate.lower_bound_us,
        "gap": estimate.gap,
        "optimizer": None if estimate.optimizer is None else asdict(estimate.optimizer),
        "whole_step_us": estimate.whole_step_us,
        "stragglers": None if estimate.stragglers is None else asdict(estimate.stragglers),
        "fsdp2": {
            **_figures_to_dict(estimate.fsdp2),
            "whole_step_us": estimate.whole_fsdp2_us,
        },
    }


def _figures_to_dict(figures: Figures) -> dict[str, Any]:
    """Without the owners of the peak, which are as many as there are groups."""
    found = {**asdict(figures), "peak_by_category": dict(figures.peak_by_category)}
    del found["peak_owners"], found["peak_at"]
    return found
