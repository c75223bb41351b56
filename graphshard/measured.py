"""What a few steps of a plan really took, on this rank and, combined, on all of them.

A direction is cut into `Stretch`es: regions of compute and single communication steps, in the
order in which they run. A `Lap` holds the times of one run of one direction; `combine` makes one
`Measured` of the laps of all ranks. Standard library only, so that it opens wherever a plan does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from graphshard.plan import Direction, Step, StepKind

# A collective is noticed to be issued when it may be over already.
LEAST_US = 1.0
WAITS = (StepKind.GATHER_WAIT, StepKind.REDUCE_WAIT)


@dataclass(frozen=True, slots=True)
class Trip:
    """One collective: when it was issued and done; None if nobody knows."""

    issued: float
    done: float | None


@dataclass(frozen=True, slots=True)
class Lap:
    """One run of a direction on one rank; times in microseconds from its start.

    marks: when each stretch began, and the end. trips: index of an issuing stretch -> its
    collective.
    """

    marks: tuple[float, ...]
    trips: Mapping[int, Trip] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One entry of a direction: `us` of work on the compute lane, `exposed_us` of waiting.

    comm_us: what the collective that it issued took on its lane, None if there was none.
    """

    step: Step
    us: float
    exposed_us: float = 0.0
    comm_us: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over `num_steps` steps, the same on all ranks. forward, backward: in order."""

    num_steps: int
    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]

    @property
    def step_time_us(self) -> float:
        return sum(s.us + s.exposed_us for s in (*self.forward, *self.backward))

    @property
    def exposed_us(self) -> float:
        return sum(s.exposed_us for s in (*self.forward, *self.backward))

    def of(self, direction: Direction) -> tuple[Stretch, ...]:
        return self.forward if direction is Direction.FORWARD else self.backward


def combine(
    steps: Sequence[Step], laps: Sequence[Sequence[Lap]], lane_of: Mapping[int, int]
) -> tuple[Stretch, ...]:
    """One direction's stretches from the laps of every rank (`laps[rank][n]`, n alike on all).

    lane_of: index of an issuing stretch -> its lane. Work is the median over laps and ranks. A
    collective's time is the shortest over ranks, then the median over laps: the rank that came
    last waited for nobody.
    """
    split = [[_split(steps, lap) for lap in own] for own in laps]
    comm = [[_lane_times(lap, lane_of) for lap in own] for own in laps]
    found = []
    for index, step in enumerate(steps):
        rows = [lap[index] for own in split for lap in own]
        found.append(
            Stretch(
                step,
                us=median(us for us, _ in rows),
                exposed_us=median(exposed for _, exposed in rows),
                comm_us=_shortest(index, comm),
            )
        )
    return tuple(found)


def _shortest(index: int, comm: list[list[dict[int, float]]]) -> float | None:
    """Of the collective issued by stretch `index`; None unless every lap of every rank had it."""
    if not all(index in lap for own in comm for lap in own):
        return None
    return median(min(own[n][index] for own in comm) for n in range(len(comm[0])))


def _split(steps: Sequence[Step], lap: Lap) -> list[tuple[float, float]]:
    """(work, waiting) of each stretch: a wait lasts until its collective is done."""
    issued = {_identity(s): i for i, s in enumerate(steps) if s.kind not in WAITS}
    found = []
    for index, step in enumerate(steps):
        start, stop = lap.marks[index], lap.marks[index + 1]
        done = None
        if step.kind in WAITS:
            trip = lap.trips.get(issued.get(_identity(step), -1))
            done = None if trip is None else trip.done
        waiting = 0.0 if done is None else min(max(0.0, done - start), stop - start)
        found.append((stop - start - waiting, waiting))
    return found


def _identity(step: Step) -> tuple[object, ...]:
    """What an issue and its wait have in common."""
    gathers = step.kind in (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT)
    reduces = step.kind in (StepKind.REDUCE_ISSUE, StepKind.REDUCE_WAIT)
    return gathers, reduces, step.start, step.groups, step.params, step.kind is StepKind.RELEASE


def _lane_times(lap: Lap, lane_of: Mapping[int, int]) -> dict[int, float]:
    """Stretch that issued -> time of its collective since the lane was free for it.

    Left out is what ended nobody knows when, and what came right behind it on its lane.
    """
    free_at: dict[int, float | None] = {}
    found = {}
    for index, trip in sorted(lap.trips.items()):
        before = free_at.get(lane_of[index], 0.0)
        if trip.done is not None and before is not None:
            found[index] = max(LEAST_US, trip.done - max(trip.issued, before))
        free_at[lane_of[index]] = trip.done
    return found


def to_json(laps: Mapping[Direction, Sequence[Lap]]) -> str:
    return json.dumps({direction: [asdict(lap) for lap in own] for direction, own in laps.items()})


def from_json(text: str) -> dict[Direction, list[Lap]]:
    return {
        Direction(direction): [
            Lap(tuple(lap["marks"]), {int(k): Trip(**v) for k, v in lap["trips"].items()})
            for lap in own
        ]
        for direction, own in json.loads(text).items()
    }
