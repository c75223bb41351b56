"""Why a plan is as it is, as facts; `graphshard.view.reasons` makes sentences of them.

Groups go by their `GroupInfo.id`, times are microseconds. `what` says which kind a reason is, in
the plan file too. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from graphshard.files.decode import Amount, Count
from graphshard.schedule.estimate import Category
from graphshard.schedule.groups import Origin
from graphshard.schedule.steps import Direction, StepKind


class Decision(StrEnum):
    """The kinds of decision on the way from FSDP2's schedule to the plan, in this order."""

    COMPUTES_AGAIN = "computes_again"
    SEPARATE_GROUP = "separate_group"
    ALL_REDUCES = "all_reduces"
    IN_PLACE = "in_place"
    KEPT = "kept"
    ON_NODE = "on_node"
    BUCKETS = "buckets"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    REDUCTIONS = "reductions"
    GATHERS = "gathers"


class Bound(StrEnum):
    """Why a collective is not issued earlier."""

    PREFETCH_LISTS = "prefetch_lists"
    NO_NEED = "no_need"
    LANE_BUSY = "lane_busy"
    MEMORY = "memory"
    GRADIENTS = "gradients"
    REDUCED = "reduced"
    ACTIVATIONS = "activations"
    FIRST = "first"
    LANE_FREE = "lane_free"
    NOT_SHORTER = "not_shorter"


class HoldRule(StrEnum):
    """Who decided whether a group stays gathered, where the planner did not."""

    USER = "user"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True)
class Gain:
    """What one kind of decision saves of FSDP2's predicted step (costs, where negative).

    The gains of a plan add up to the whole difference, exactly. of_us: the step before it.
    """

    decision: Decision
    gain_us: float
    gain_bytes: int
    of_us: Amount
    what: Literal["gain"] = "gain"


@dataclass(frozen=True, slots=True)
class Hold:
    """Whether a group stays gathered from forward to backward.

    saved_us: of gathers in backward, if it does. held_us: compute over which it then holds
    `held_bytes`. across: it stays between micro-steps, too. on_node: it does not, but the ranks of
    each node hold a shard of it. rule: None if the planner decided.
    """

    group: Count
    is_kept: bool
    saved_us: Amount
    held_us: Amount
    held_bytes: Count
    across: bool = False
    on_node: bool = False
    rule: HoldRule | None = None
    what: Literal["hold"] = "hold"


@dataclass(frozen=True, slots=True)
class Merge:
    """A group that shares collectives of `kind`; launch_us: of the launch that is saved."""

    group: Count
    direction: Direction
    kind: StepKind
    launch_us: Amount
    what: Literal["merge"] = "merge"


@dataclass(frozen=True, slots=True)
class Split:
    """A group that travels in `num_parts` collectives of `kind`, with a launch for each."""

    group: Count
    direction: Direction
    kind: StepKind
    num_parts: Count
    launch_us: Amount
    what: Literal["split"] = "split"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What made the activations of `group` that backward computes `again`, and those that could be
    and are `saved`.

    extra_us: what that takes one by one; together at most that. saved_bytes: free meanwhile.
    """

    group: Count
    again: tuple[Origin, ...]
    saved: tuple[Origin, ...]
    extra_us: Amount
    saved_bytes: Count
    what: Literal["recompute"] = "recompute"

    @property
    def num_options(self) -> int:
        return len(self.again) + len(self.saved)


@dataclass(frozen=True, slots=True)
class Offloading:
    """What made the activations of `group` that the host holds from forward to backward:
    `size_bytes` of them."""

    group: Count
    away: tuple[Origin, ...]
    size_bytes: Count
    what: Literal["offload"] = "offload"


@dataclass(frozen=True, slots=True)
class ExchangeRate:
    """What memory is bought for with time, in microseconds for each GiB.

    taken: of the dearest activation that is computed again. left: of the cheapest that is saved.
    None where there is none.
    """

    taken_us_per_gib: Amount | None
    left_us_per_gib: Amount | None
    what: Literal["exchange_rate"] = "exchange_rate"


@dataclass(frozen=True, slots=True)
class Held:
    """What is held for one category."""

    category: Category
    bytes: int


@dataclass(frozen=True, slots=True)
class NotEarlier:
    """Why the collective of `group` (its first one) that a step of `kind` issues is not earlier.

    exposed_us: compute waits so long for it. NO_NEED: it is done `spare_us` before. LANE_BUSY: with
    the `busy_kind` of groups `busy`, until `until_us` of the direction. MEMORY: `missing_bytes` of
    the budget, and the categories that hold most.
    """

    group: Count
    direction: Direction
    kind: StepKind
    bound: Bound
    exposed_us: Amount = 0.0
    spare_us: Amount = 0.0
    busy_kind: StepKind | None = None
    busy: tuple[Count, ...] = ()
    until_us: Amount = 0.0
    missing_bytes: Count = 0
    held: tuple[Held, ...] = ()
    what: Literal["not_earlier"] = "not_earlier"


Reason: TypeAlias = (
    Gain | Hold | Merge | Split | Recomputation | Offloading | ExchangeRate | NotEarlier
)


def group_of(reason: Reason) -> int | None:
    """The group that it is about; None: the whole plan."""
    return None if isinstance(reason, Gain | ExchangeRate) else reason.group
