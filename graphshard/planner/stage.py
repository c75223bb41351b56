"""One direction with everything decided but positions, and how positions make it a schedule.

In come a problem and `Choices`; out comes a `Stage`: compute, waits and releases at fixed
positions, and jobs (gathers and reductions) that a `Placement` puts between them. A position is
an int. Before each region lies a slot of `stride` positions, and the region is its last one:

    0 reduce wait   1 release   2 gather issue   3 reduce issue (and a wait between two of them)
    4 gather issue  5 reduce wait   6, 8, ... gather wait   7, 9, ... gather issue   -1 region

Events at one position come in the order of their jobs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter

from graphshard.plan import Direction, Schedule, Step, StepKind
from graphshard.planner.choices import (
    Bucket,
    Choices,
    first_use,
    gather_buckets,
    ready_after,
    reduce_buckets,
)
from graphshard.planner.events import (
    Event,
    Turn,
    gather_events,
    reduce_events,
    region_events,
    release_event,
)
from graphshard.planner.problem import Problem

REDUCE_WAIT, RELEASE, GATHER_EARLY, REDUCE_ISSUE, GATHER_NEXT, REDUCE_WAIT_LATE, GATHER_WAIT = (
    range(7)
)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One collective. `at`: where a gather is waited for; where a reduction may be issued first.

    flight_bytes: what it holds from its issue until its wait.
    """

    bucket: Bucket
    issue: Event
    wait: Event
    at: int
    flight_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Fixed events with their positions in rising order, and the jobs to be placed.

    gathers in order of first use, reductions in order of readiness.
    """

    direction: Direction
    stride: int
    num_regions: int
    fixed: tuple[tuple[int, Event], ...]
    gathers: tuple[Job, ...]
    reductions: tuple[Job, ...]

    @property
    def end(self) -> int:
        """The position of the last waits for reductions."""
        return self.num_regions * self.stride + REDUCE_WAIT_LATE


@dataclass(frozen=True, slots=True)
class Placement:
    """Positions: of each gather's issue; of each reduction's issue and wait, in order of issue."""

    gathers: tuple[int, ...]
    reductions: tuple[Reduced, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduced:
    """Where reduction `job` (an index of Stage.reductions) is issued and waited for."""

    job: int
    issue: int
    wait: int


def stage_of(problem: Problem, choices: Choices, direction: Direction, turn: Turn) -> Stage:
    """The stage of one direction in micro-step `turn`. Positions are the same in every turn."""
    buckets = gather_buckets(problem, choices, direction)
    backward = direction is Direction.BACKWARD
    quiet = _quiet(problem, choices) if backward else []
    count = len(problem.regions(direction))
    due = [(first_use(problem, b, direction), b) for b in chain(quiet, buckets)]
    most = max(Counter(first for first, _ in due).values(), default=1)
    stride = GATHER_WAIT + 2 * most + 2
    fixed: list[tuple[int, Event]] = []
    gathers: list[Job] = []
    taken: Counter[int] = Counter()
    for first, bucket in sorted(due, key=lambda d: (d[0], d[1].groups, d[1].parts)):
        at = first * stride + GATHER_WAIT + 2 * taken[first]
        taken[first] += 1
        kept = backward and bucket.groups[0] in choices.kept
        carried = not backward and not turn.first and bucket.groups[0] in choices.across
        issue, wait = gather_events(problem, bucket, direction, resident=kept or carried)
        fixed.extend([(at, issue), (at, wait)] if kept else [(at, wait)])
        if not kept:
            gathers.append(Job(bucket, issue, wait, at, issue.alloc_bytes))
    regions = region_events(problem, choices, direction)
    fixed.extend((index * stride + stride - 1, event) for index, event in enumerate(regions))
    fixed.extend(_releases(problem, choices, direction, turn, stride))
    fixed.sort(key=itemgetter(0))
    reductions = _reductions(problem, choices, turn, stride) if backward else ()
    return Stage(direction, stride, count, tuple(fixed), tuple(gathers), reductions)


def _quiet(problem: Problem, choices: Choices) -> list[Bucket]:
    """What backward finds still gathered."""
    used = (problem.groups[n].use_in(Direction.BACKWARD) for n in choices.kept)
    return [Bucket((n,)) for n, use in zip(choices.kept, used, strict=True) if use is not None]


def _releases(
    problem: Problem, choices: Choices, direction: Direction, turn: Turn, stride: int
) -> list[tuple[int, Event]]:
    found = []
    for group in problem.groups:
        use = group.use_in(direction)
        if use is not None and use.last is not None:
            event = release_event(problem, group.id, choices, direction, turn)
            found.append(((use.last + 1) * stride + RELEASE, event))
    return found


def _reductions(problem: Problem, choices: Choices, turn: Turn, stride: int) -> tuple[Job, ...]:
    delays, last = dict(choices.delays), len(problem.backward)
    jobs = []
    for bucket in reduce_buckets(problem, choices):
        issue, wait = reduce_events(problem, bucket, turn)
        slot = min(last, ready_after(problem, bucket) + 1 + delays.get(bucket.groups[0], 0))
        jobs.append(Job(bucket, issue, wait, slot * stride + REDUCE_ISSUE, wait.free_bytes))
    return tuple(sorted(jobs, key=lambda job: job.at))


def assemble(stage: Stage, placement: Placement) -> list[Event]:
    """The events of `stage` in the order that `placement` gives them."""
    return [event for _, event in placed(stage, placement)]


def placed(stage: Stage, placement: Placement) -> list[tuple[int, Event]]:
    """All events with their positions, in order."""
    gathers = zip(placement.gathers, (j.issue for j in stage.gathers), strict=True)
    reductions = (
        entry
        for reduced in placement.reductions
        for entry in (
            (reduced.issue, stage.reductions[reduced.job].issue),
            (reduced.wait, stage.reductions[reduced.job].wait),
        )
    )
    entries = [*stage.fixed, *gathers, *reductions]
    entries.sort(key=itemgetter(0))
    return entries


def next_gather_position(stage: Stage, position: int) -> int:
    """The first position after `position` where a gather may be issued."""
    slot, phase = divmod(position, stage.stride)
    if phase >= stage.stride - 3:
        return (slot + 1) * stage.stride + GATHER_EARLY
    for candidate in (GATHER_EARLY, GATHER_NEXT):
        if phase < candidate:
            return slot * stage.stride + candidate
    if phase <= GATHER_WAIT:
        return slot * stage.stride + GATHER_WAIT + 1
    return position + 1 + phase % 2


def gather_positions(stage: Stage) -> list[int]:
    """Every position where a gather may be issued, in order."""
    phases = (GATHER_EARLY, GATHER_NEXT, *range(GATHER_WAIT + 1, stage.stride - 1, 2))
    slots = range(0, stage.num_regions * stage.stride + 1, stage.stride)
    return [slot + phase for slot in slots for phase in phases]


def position_before(stage: Stage, wait: int) -> int:
    """The last position before the gather wait at `wait` where a gather may be issued."""
    slot, phase = divmod(wait, stage.stride)
    return wait - 1 if phase > GATHER_WAIT else slot * stage.stride + GATHER_NEXT


def schedule_of(stage: Stage, placement: Placement) -> Schedule:
    """The schedule, with neighbouring regions joined into one compute step."""
    steps: list[Step] = []
    for event in assemble(stage, placement):
        step = event.step
        if steps and step.kind is StepKind.COMPUTE is steps[-1].kind:
            steps[-1] = replace(steps[-1], stop=step.stop)
        else:
            steps.append(step)
    return Schedule(stage.direction, tuple(steps))
