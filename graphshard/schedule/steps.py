"""The vocabulary of schedules: directions, steps, lanes. Plain values with a JSON form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from graphshard.files.decode import Count


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class StepKind(StrEnum):
    """What happens at one point of a schedule, named as FSDP2's users name it."""

    COMPUTE = "compute"
    GATHER_ISSUE = "gather_issue"
    GATHER_WAIT = "gather_wait"
    RELEASE = "release"
    REDUCE_ISSUE = "reduce_issue"
    REDUCE_WAIT = "reduce_wait"
    ALL_REDUCE_ISSUE = "all_reduce_issue"
    ALL_REDUCE_WAIT = "all_reduce_wait"
    OFFLOAD_ISSUE = "offload_issue"
    OFFLOAD_WAIT = "offload_wait"
    RELOAD_ISSUE = "reload_issue"
    RELOAD_WAIT = "reload_wait"


class Lane(StrEnum):
    """One in-order queue."""

    COMPUTE = "compute"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    OFFLOAD = "offload"
    RELOAD = "reload"


COPIES = (Lane.OFFLOAD, Lane.RELOAD)


class StepIdentity(NamedTuple):
    """kind: that of the issue, where it is a collective's."""

    kind: StepKind
    groups: tuple[int, ...]
    params: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a schedule.

    `group` is a GroupInfo.id (None for compute). A COMPUTE step covers the ops
    [`start`, `stop`) of the direction's compute order. `kept` on a RELEASE: the group stays
    gathered until backward; on a GATHER_ISSUE: it is expected to be still gathered, so that no
    collective runs. `with_groups`: further groups that travel in the same collective. `params`:
    the places of the parameters of `group` that travel in it, where a group is split (empty: all).
    `on_node` on a RELEASE of forward: the ranks of each node hold a shard of it until backward; on
    the gather in backward: it is gathered from that.
    """

    kind: StepKind
    group: Count | None = None
    start: Count = 0
    stop: Count = 0
    kept: bool = False
    with_groups: tuple[Count, ...] = ()
    params: tuple[Count, ...] = ()
    on_node: bool = False

    @property
    def groups(self) -> tuple[int, ...]:
        return () if self.group is None else (self.group, *self.with_groups)

    @property
    def identity(self) -> StepIdentity:
        """What the issue of a collective and its wait have in common, and no other step of a
        direction."""
        return StepIdentity(ISSUE_OF.get(self.kind, self.kind), self.groups, self.params)

    @property
    def lane(self) -> Lane:
        return _LANES.get(self.kind, Lane.COMPUTE)

    @property
    def is_copy(self) -> bool:
        """To the host or back."""
        return self.lane in COPIES


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one direction in the order in which the host runs them."""

    direction: Direction
    steps: tuple[Step, ...]

    def of_kind(self, *kinds: StepKind) -> Iterator[Step]:
        return (s for s in self.steps if s.kind in kinds)

    @property
    def num_all_gathers(self) -> int:
        return sum(not s.kept for s in self.of_kind(StepKind.GATHER_ISSUE))

    @property
    def num_reduce_scatters(self) -> int:
        return sum(1 for _ in self.of_kind(StepKind.REDUCE_ISSUE))

    @property
    def num_all_reduces(self) -> int:
        return sum(1 for _ in self.of_kind(StepKind.ALL_REDUCE_ISSUE))

    @property
    def num_collectives(self) -> int:
        return self.num_all_gathers + self.num_reduce_scatters + self.num_all_reduces


RARE = ("with_groups", "params", "on_node")


def to_json(value: Any, indent: int | None = None) -> str:
    """Dataclasses as objects. What only some steps have is written for those steps only."""
    return json.dumps(value, indent=indent, default=_fields)


def _fields(value: Any) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Step):
        return {k: v for k, v in found.items() if v or k not in RARE}
    return found


# Issue of a collective, or of a copy to or from the host -> its wait, and the other way round.
WAIT_OF = {
    StepKind.GATHER_ISSUE: StepKind.GATHER_WAIT,
    StepKind.REDUCE_ISSUE: StepKind.REDUCE_WAIT,
    StepKind.ALL_REDUCE_ISSUE: StepKind.ALL_REDUCE_WAIT,
    StepKind.OFFLOAD_ISSUE: StepKind.OFFLOAD_WAIT,
    StepKind.RELOAD_ISSUE: StepKind.RELOAD_WAIT,
}
ISSUE_OF = {wait: issue for issue, wait in WAIT_OF.items()}
ISSUES, WAITS = tuple(WAIT_OF), tuple(ISSUE_OF)
COLLECTIVES = (StepKind.GATHER_ISSUE, StepKind.REDUCE_ISSUE, StepKind.ALL_REDUCE_ISSUE)

_LANES = {
    kind: lane
    for issue, lane in zip(
        WAIT_OF,
        (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, *COPIES),
        strict=True,
    )
    for kind in (issue, WAIT_OF[issue])
}

RANGES = {
    StepKind.GATHER_ISSUE: "all_gather",
    StepKind.GATHER_WAIT: "all_gather_wait",
    StepKind.RELEASE: "release",
    StepKind.REDUCE_ISSUE: "reduce_scatter",
    StepKind.REDUCE_WAIT: "reduce_scatter_wait",
    StepKind.ALL_REDUCE_ISSUE: "all_reduce",
    StepKind.ALL_REDUCE_WAIT: "all_reduce_wait",
    StepKind.OFFLOAD_ISSUE: "offload",
    StepKind.OFFLOAD_WAIT: "offload_wait",
    StepKind.RELOAD_ISSUE: "reload",
    StepKind.RELOAD_WAIT: "reload_wait",
}


def range_name(kind: StepKind, fqns: Sequence[str], params: Sequence[int] = ()) -> str:
    """The name of a step in profiles and traces: "graphshard::all_gather layers.3".

    fqns: of the groups that travel together. params: the places of the parameters that travel,
    where a group is split.
    """
    places = f" {list(params)}" if params else ""
    return f"graphshard::{RANGES[kind]} {' + '.join(fqns)}{places}"


def direction_range_name(direction: Direction) -> str:
    """The name in profiles of everything that one direction runs."""
    return f"graphshard::{direction}"
