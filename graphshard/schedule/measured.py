"""What a few steps of a plan really took, on this rank and, combined, on all of them.

A direction is cut into `Segment`s: regions of compute and single communication steps, in the order
in which they run. A `DirectionRun` holds the times of one run of one direction; `combine` makes one
`Measured` of the runs of all ranks. Standard library only, so that it opens wherever a plan does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from graphshard.files.decode import Amount, Positive, decode, parse
from graphshard.schedule.steps import ISSUES, WAITS, Direction, Step

# A collective is noticed to be issued when it may be over already.
LEAST_US = 1.0


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """One collective: when it was issued and done; None if nobody knows."""

    issued: float
    done: float | None


@dataclass(frozen=True, slots=True)
class DirectionRun:
    """One run of a direction on one rank; times in microseconds from its start.

    marks: when each segment began, and the end. timings: index of an issuing segment -> its
    collective.
    """

    marks: tuple[float, ...]
    timings: Mapping[int, CollectiveTiming] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """One entry of a direction: `us` of work on the compute lane, `exposed_us` of waiting.

    comm_us: what the collective that it issued took on its lane, None if there was none.
    """

    step: Step
    us: Amount
    exposed_us: Amount = 0.0
    comm_us: Amount | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over `num_steps` steps, the same on all ranks. forward, backward: in order.

    step_time_us, exposed_us: of whole steps; medians of parts do not add up to them.
    """

    num_steps: Positive
    step_time_us: Amount
    exposed_us: Amount
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]

    def of(self, direction: Direction) -> tuple[Segment, ...]:
        return self.forward if direction is Direction.FORWARD else self.backward


@dataclass(frozen=True, slots=True)
class Issued:
    """What is known of a collective before it runs: its lane, and its share of the lane's work."""

    lane: int
    weight: float


def combine(
    steps: Sequence[Step], runs: Sequence[Sequence[DirectionRun]], issued: Mapping[int, Issued]
) -> tuple[Segment, ...]:
    """One direction's segments from the runs of every rank (`runs[rank][n]`, n alike on all).

    issued: by index of the issuing segment. Work is the slowest rank's, for which the others wait
    at the next collective; a collective's time is the shortest over ranks, since the rank that came
    last waited for nobody; then the median over runs.
    """
    split = [[_split(steps, run) for run in own] for own in runs]
    comm = [[lane_times(run, issued) for run in own] for own in runs]
    found = []
    for index, step in enumerate(steps):
        columns = [[run[index] for run in ranks] for ranks in zip(*split, strict=True)]
        found.append(
            Segment(
                step,
                us=median(max(us for us, _ in column) for column in columns),
                exposed_us=median(min(exposed for _, exposed in column) for column in columns),
                comm_us=_shortest(index, comm),
            )
        )
    return tuple(found)


def whole(
    steps: Sequence[Sequence[Step]], runs: Sequence[Sequence[Sequence[DirectionRun]]]
) -> tuple[float, float]:
    """Time of a step and how much of it was waiting; directions first, then as `combine` has it.

    Medians over runs of the slowest rank's time and of the least waiting.
    """
    totals: list[list[tuple[float, float]]] = []
    for own, ranks in zip(steps, runs, strict=True):
        split = [[_split(own, run) for run in one] for one in ranks]
        totals.append([_total(run) for run in zip(*split, strict=True)])
    pairs = list(zip(*totals, strict=True))
    return (
        median(sum(us for us, _ in pair) for pair in pairs),
        median(sum(exposed for _, exposed in pair) for pair in pairs),
    )


def _total(ranks: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """One run of a direction: the slowest rank's time, the least waiting of any."""
    return (
        max(sum(us + waiting for us, waiting in run) for run in ranks),
        min(sum(waiting for _, waiting in run) for run in ranks),
    )


def _shortest(index: int, comm: list[list[dict[int, float]]]) -> float | None:
    """Of the collective issued by segment `index`; None unless every rank saw it in some run."""
    seen = [[run[index] for run in own if index in run] for own in comm]
    count = min(map(len, seen))
    if count == 0:
        return None
    return median(min(own[n] for own in seen) for n in range(count))


def _split(steps: Sequence[Step], run: DirectionRun) -> list[tuple[float, float]]:
    """(work, waiting) of each segment: a wait lasts until its collective is done."""
    issued = {s.identity: i for i, s in enumerate(steps) if s.kind in ISSUES}
    found = []
    for index, step in enumerate(steps):
        start, stop = run.marks[index], run.marks[index + 1]
        done = None
        if step.kind in WAITS:
            timing = run.timings.get(issued.get(step.identity, -1))
            done = None if timing is None else timing.done
        waiting = 0.0 if done is None else min(max(0.0, done - start), stop - start)
        found.append((stop - start - waiting, waiting))
    return found


def lane_times(run: DirectionRun, issued: Mapping[int, Issued]) -> dict[int, float]:
    """Segment that issued -> time that its collective took of its lane.

    Left out are what comes after the last known end of a lane, and what nobody planned (a user's
    prefetch list, say).
    """
    lanes: dict[int, dict[int, CollectiveTiming]] = {}
    for index, timing in sorted(run.timings.items()):
        if index in issued:
            lanes.setdefault(issued[index].lane, {})[index] = timing
    found: dict[int, float] = {}
    for timings in lanes.values():
        found |= _of_lane(timings, {index: issued[index].weight for index in timings})
    return dict(sorted(found.items()))


def _of_lane(
    timings: Mapping[int, CollectiveTiming], weights: Mapping[int, float]
) -> dict[int, float]:
    """From one known end to the next the time is shared out by weight; if nothing lies between
    them, it is what the second one took."""
    found: dict[int, float] = {}
    free_at, issued = 0.0, {}
    for index, timing in timings.items():
        issued[index] = max(timing.issued, free_at)
        if timing.done is not None:
            found |= _shared(issued, timing.done, weights)
            free_at, issued = max(free_at, timing.done), {}
    return found


def _shared(
    issued: Mapping[int, float], end: float, weights: Mapping[int, float]
) -> dict[int, float]:
    """Times in proportion to `weights`, so that the last one ends at `end`.

    A collective starts when it is issued and the lane is free. So the lane ends where its last
    idle moment lies, which is some issue, plus all work from there on: the factor is the largest
    for which no such end is later than the known one.
    """
    work, factors = 0.0, []
    for index in reversed(list(issued)):
        work += weights[index] or LEAST_US
        factors.append((end - issued[index]) / work)
    factor = max(0.0, min(factors))
    return {index: max(LEAST_US, factor * (weights[index] or LEAST_US)) for index in issued}


def to_json(runs: Mapping[Direction, Sequence[DirectionRun]]) -> str:
    return json.dumps({direction: [asdict(run) for run in own] for direction, own in runs.items()})


@dataclass(frozen=True, slots=True)
class _DirectionRunText:
    """A run as JSON has it, which knows text as keys only."""

    marks: tuple[float, ...]
    timings: dict[str, CollectiveTiming]


def from_json(text: str) -> dict[Direction, list[DirectionRun]]:
    """What `to_json` wrote. Raises ValueError for anything else."""
    found: dict[str, tuple[_DirectionRunText, ...]] = decode(
        dict[str, tuple[_DirectionRunText, ...]], parse(text)
    )
    return {
        Direction(direction): [
            DirectionRun(run.marks, {int(k): timing for k, timing in run.timings.items()})
            for run in own
        ]
        for direction, own in found.items()
    }
