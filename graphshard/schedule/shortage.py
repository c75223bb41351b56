"""Why no schedule fits a budget, as facts; `graphshard.view.shortage` makes sentences of them.

Groups go by their `GroupInfo.id`; `names` has their FQNs. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from graphshard.schedule.estimate import Allocation
from graphshard.schedule.groups import Origin
from graphshard.schedule.steps import Direction, Step


class Remedy(StrEnum):
    """What would help."""

    UNIT = "unit"
    BUDGET = "budget"
    HALF_THE_BATCH = "half_the_batch"
    RESHARD = "reshard"
    SYNC_EACH = "sync_each"


@dataclass(frozen=True, slots=True)
class Help:
    """peak_bytes: what the least peak would become, by planning; groups: what it is done to."""

    remedy: Remedy
    peak_bytes: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What forward saves for backward and no plan can free: `count` values of alike modules, which
    take `size_bytes` together. wanted: the user's checkpoint policy says MUST_SAVE."""

    origin: Origin
    size_bytes: int
    count: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Shortage:
    """least_bytes: the least peak that was found for any schedule, during `step` of `direction`,
    when `owners` hold most. fsdp2_bytes: the peak of FSDP2's own schedule. held: the largest
    first."""

    budget_bytes: int
    least_bytes: int
    fsdp2_bytes: int
    direction: Direction
    step: Step
    owners: tuple[Allocation, ...]
    helps: tuple[Help, ...]
    names: tuple[tuple[int, str], ...]
    held: tuple[Held, ...] = ()
