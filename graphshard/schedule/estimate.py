"""What the cost model says of a plan: time, memory by category, and the same of FSDP2's schedule.

Plain values with a JSON form; in the plan file an `Estimate` is what `dataclasses.asdict` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
class Spent:
    """Forward and backward of a plan with more memory, hardly faster than the one that is taken."""

    step_time_us: Amount
    peak_bytes: Count


@dataclass(frozen=True, slots=True)
class Rung:
    """The same step with a budget of `budget_bytes`: forward and backward of it, and its peak.
    Those of the plan itself where more memory brings less than it is worth."""

    budget_bytes: Count
    step_time_us: Amount
    peak_bytes: Count


class Limit(StrEnum):
    """What the peak of a plan was held to: a budget that somebody set, or FSDP2's own peak."""

    BUDGET = "budget"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The figures of the plan and of FSDP2's own schedule, both of the same graph.

    budget_bytes: the peak was held to that, see `limit`.
    lower_bound_us: no forward and backward of this graph is faster, whatever its memory. optimizer:
    None where the graph does not train, and for what was planned before it was priced. stragglers:
    expected on top of all other figures, which are of ranks that are all alike; None: not known.
    all_spent: if memory were also spent where it brings next to nothing; None: nothing is left.
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
    all_spent: Spent | None = None
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
    def limit(self) -> Limit:
        """Without a budget the planner takes FSDP2's peak; whoever sets just that sets nothing."""
        return Limit.FSDP2 if self.budget_bytes == self.fsdp2.peak_bytes else Limit.BUDGET

    @property
    def gap(self) -> float:
        """How far the whole step may be from the best possible, as a share of that."""
        bound = self.whole_bound_us
        return (self.whole_step_us - bound) / bound if bound else 0.0
