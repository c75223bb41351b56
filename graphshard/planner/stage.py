"""One direction with everything decided but positions, and how positions make it a schedule.

In come a problem and `Choices`; out comes a `Stage`: compute, waits and releases at fixed
positions, and jobs (gathers and reductions) that a `Placement` puts between them. A copy back from
the host is placed as a gather is, and one to the host as a reduction: what follows says so of all
four. A position is an int. Before each region lies a slot of `stride` positions, and the region is
its last one:

    0 reduce wait   1 release   2 gather issue   3 reduce issue (and a wait between two of them)
    4 gather issue  5 reduce wait   6, 8, ... gather wait   7, 9, ... gather issue   -1 region

Events at one position come in the order of their jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter

from graphshard.planner.choices import (
    Bucket,
    Choices,
    first_use,
    gather_buckets,
    offloads_of,
    ready_after,
    reduce_buckets,
)
from graphshard.planner.events import (
    Event,
    MicroStep,
    all_reduce_events,
    gather_events,
    micro_steps_of,
    offload_events,
    reduce_events,
    release_event,
    reload_events,
)
from graphshard.planner.memo import Memo, once, recently
from graphshard.planner.problem import Problem
from graphshard.planner.regions import RegionState, born_gradients, region_event, region_states
from graphshard.schedule.plan import Direction, Schedule, Step, StepKind

REDUCE_WAIT, RELEASE, GATHER_EARLY, REDUCE_ISSUE, GATHER_NEXT, REDUCE_WAIT_LATE, GATHER_WAIT = (
    range(7)
)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One collective, or one copy, whose bucket is empty. `at`: where a gather is waited for; where
    a reduction may be issued first.

    flight_bytes: what it holds from its issue until its wait. all_reduce: issue and wait of the
    all-reduce that follows a reduction over replicas.
    """

    bucket: Bucket
    issue: Event
    wait: Event
    at: int
    flight_bytes: int
    all_reduce: tuple[Event, Event] | None = None


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

    @property
    def all_reduces(self) -> bool:
        """Some reduction is followed by an all-reduce."""
        return any(job.all_reduce is not None for job in self.reductions)


@dataclass(frozen=True, slots=True)
class Placement:
    """Positions: of each gather's issue; of each reduction's issue and wait, in order of issue."""

    gathers: tuple[int, ...]
    reductions: tuple[Reduced, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduced:
    """Where reduction `job` (an index of Stage.reductions) is issued and waited for.

    An all-reduce that follows is issued at that wait, and itself waited for at `done` (None: after
    everything else). chained: it is issued with the reduction instead, and starts when that is
    done, which is what FSDP2's streams do.
    """

    job: int
    issue: int
    wait: int
    done: int | None = None
    chained: bool = False


def stages_of(memo: Memo, choices: Choices, direction: Direction) -> list[Stage]:
    """Those of all micro-steps."""
    micro_steps = micro_steps_of(memo.problem)
    return [stage_of(memo, choices, direction, micro) for micro, _ in micro_steps]


def stage_of(memo: Memo, choices: Choices, direction: Direction, micro: MicroStep) -> Stage:
    """The stage of one direction in one micro-step. Positions are the same in all of them."""
    forward = direction is Direction.FORWARD
    across = choices.across
    found = across if forward and not micro.first else ()  # still gathered
    left = () if micro.last else across
    key = (
        forward,
        (choices.kept, choices.on_node) if not forward else (),
        across,
        found,
        choices.cuts_in(direction),
        choices.offload if not forward else (),
    )
    stride, fixed, gathers = recently(
        memo, "gathers", key, lambda: _gathers(memo, choices, direction, found)
    )
    regions = recently(
        memo,
        "regions",
        (forward, choices.recompute, choices.offload, stride),
        lambda: _regions(memo, choices, direction, stride),
    )
    releases = recently(
        memo,
        "releases",
        (forward, (choices.kept, choices.on_node) if forward else (), left, stride),
        lambda: _releases(memo, choices, direction, left, stride),
    )
    if forward:
        reductions = recently(
            memo,
            "offloads",
            (choices.offload, stride),
            lambda: _offloads(memo, choices, stride),
        )
    else:
        reductions = recently(
            memo,
            "reductions",
            (micro, choices.reduce, choices.delays, stride),
            lambda: _reductions(memo, choices, micro, stride),
        )
    ordered = sorted([*fixed, *regions, *releases], key=itemgetter(0))
    return Stage(direction, stride, len(regions), tuple(ordered), gathers, reductions)


def _gathers(
    memo: Memo, choices: Choices, direction: Direction, found: Sequence[int]
) -> tuple[int, list[tuple[int, Event]], tuple[Job, ...]]:
    """The stride, the waits (issues of what is kept too) and the gathers to be placed. found: the
    groups that are still gathered from the micro-step before."""
    backward = direction is Direction.BACKWARD
    kept = set(choices.kept) if backward else set()
    on_node = set(choices.on_node) if backward else set()
    resident = {*kept, *found}
    buckets = [*_quiet(memo, choices, direction), *gather_buckets(memo, choices, direction)]
    first_uses = [(first_use(memo, bucket, direction), bucket) for bucket in buckets]
    reloads = _reloads(memo, choices) if backward else []
    most = max(Counter(r for r, _ in (*first_uses, *reloads)).values(), default=1)
    stride = GATHER_WAIT + 2 * most + 2
    fixed: list[tuple[int, Event]] = []
    jobs: list[Job] = []
    taken: Counter[int] = Counter()
    for region, bucket in sorted(first_uses, key=_by_first_use):
        at = region * stride + GATHER_WAIT + 2 * taken[region]
        taken[region] += 1
        first = bucket.groups[0]
        issue, wait = _gather(memo, bucket, direction, first in resident, first in on_node)
        fixed.extend([(at, issue), (at, wait)] if first in kept else [(at, wait)])
        if first not in kept:
            jobs.append(Job(bucket, issue, wait, at, issue.alloc_bytes))
    for region, (issue, wait) in reloads:
        at = region * stride + GATHER_WAIT + 2 * taken[region]
        taken[region] += 1
        fixed.append((at, wait))
        jobs.append(Job(Bucket(()), issue, wait, at, issue.alloc_bytes))
    return stride, fixed, tuple(sorted(jobs, key=lambda job: job.at))


def _reloads(memo: Memo, choices: Choices) -> list[tuple[int, tuple[Event, Event]]]:
    """Copies back from the host, each with the region before which it has to be there."""
    found = offloads_of(memo.problem, choices)
    return [
        (o.before, once(memo, ("reload", o), partial(reload_events, memo.problem, o)))
        for o in found
    ]


def _offloads(memo: Memo, choices: Choices, stride: int) -> tuple[Job, ...]:
    """Copies to the host: what a reduction is in backward."""
    jobs = []
    for offload in offloads_of(memo.problem, choices):
        make = partial(offload_events, memo.problem, offload)
        issue, wait = once(memo, ("offload", offload), make)
        at = (offload.after + 1) * stride + REDUCE_ISSUE
        jobs.append(Job(Bucket(()), issue, wait, at, wait.free_bytes))
    return tuple(sorted(jobs, key=lambda job: job.at))


def _by_first_use(use: tuple[int, Bucket]) -> tuple[object, ...]:
    region, bucket = use
    return region, bucket.groups, bucket.parts


def _quiet(memo: Memo, choices: Choices, direction: Direction) -> list[Bucket]:
    """What backward finds still gathered."""
    if direction is Direction.FORWARD:
        return []
    groups = memo.problem.groups
    return [Bucket((n,)) for n in choices.kept if groups[n].use_in(direction) is not None]


def _gather(
    memo: Memo, bucket: Bucket, direction: Direction, resident: bool, on_node: bool
) -> tuple[Event, Event]:
    return once(
        memo,
        ("gather", bucket, direction, resident, on_node),
        lambda: gather_events(memo.problem, bucket, direction, resident=resident, on_node=on_node),
    )


def _regions(
    memo: Memo, choices: Choices, direction: Direction, stride: int
) -> list[tuple[int, Event]]:
    born = once(memo, ("born", direction), lambda: born_gradients(memo.problem, direction))

    def event(state: RegionState) -> Event:
        key = "region", direction, state  # choices change few regions
        return once(memo, key, lambda: region_event(memo.problem, direction, state, born))

    states = region_states(memo.problem, choices, direction)
    return [(state.index * stride + stride - 1, event(state)) for state in states]


def _releases(
    memo: Memo, choices: Choices, direction: Direction, left: Sequence[int], stride: int
) -> list[tuple[int, Event]]:
    """left: the groups that stay gathered for the next micro-step."""
    chosen = [set(items) for items in (choices.kept, left, choices.on_node)]

    def event(number: int) -> Event:
        kept, is_left, on_node = (number in items for items in chosen)
        return once(
            memo,
            ("release", number, direction, kept, is_left, on_node),
            lambda: release_event(memo.problem, number, choices, direction, is_left=is_left),
        )

    lasts = once(memo, ("last uses", direction), lambda: _last_uses(memo.problem, direction))
    return [((last + 1) * stride + RELEASE, event(number)) for number, last in lasts]


def _last_uses(problem: Problem, direction: Direction) -> list[tuple[int, int]]:
    """Each group that is released, and the last region that reads it."""
    uses = ((group.id, group.use_in(direction)) for group in problem.groups)
    return [(n, use.last) for n, use in uses if use is not None and use.last is not None]


def _reductions(memo: Memo, choices: Choices, micro: MicroStep, stride: int) -> tuple[Job, ...]:
    delays, end = dict(choices.delays), len(memo.problem.backward)
    jobs = []
    for bucket in reduce_buckets(memo, choices):
        issue, wait = _reduction(memo, bucket, micro)
        slot = min(end, ready_after(memo, bucket) + 1 + delays.get(bucket.groups[0], 0))
        at, all_reduce = slot * stride + REDUCE_ISSUE, _all_reduce(memo, bucket, micro)
        jobs.append(Job(bucket, issue, wait, at, wait.free_bytes, all_reduce))
    return tuple(sorted(jobs, key=lambda job: job.at))


def _reduction(memo: Memo, bucket: Bucket, micro: MicroStep) -> tuple[Event, Event]:
    return once(
        memo,
        ("reduction", bucket, micro),
        lambda: reduce_events(memo.problem, bucket, micro),
    )


def _all_reduce(memo: Memo, bucket: Bucket, micro: MicroStep) -> tuple[Event, Event] | None:
    return once(
        memo,
        ("all-reduce", bucket, micro),
        lambda: all_reduce_events(memo.problem, bucket, micro),
    )


def assemble(stage: Stage, placement: Placement) -> list[Event]:
    """The events of `stage` in the order that `placement` gives them."""
    return [event for _, event in placed(stage, placement)]


def placed(stage: Stage, placement: Placement) -> list[tuple[int, Event]]:
    """All events with their positions, in order."""
    gathers = zip(placement.gathers, (j.issue for j in stage.gathers), strict=True)
    reductions = chain.from_iterable(_reduced(stage, one) for one in placement.reductions)
    entries = [*stage.fixed, *gathers, *reductions]
    entries.sort(key=itemgetter(0))
    return entries


def _reduced(stage: Stage, reduced: Reduced) -> Iterator[tuple[int, Event]]:
    job = stage.reductions[reduced.job]
    yield reduced.issue, job.issue
    if job.all_reduce is None:
        yield reduced.wait, job.wait
        return
    issue, wait = job.all_reduce
    if reduced.chained:
        yield reduced.issue, issue
    yield reduced.wait, job.wait
    if not reduced.chained:
        yield reduced.wait, issue
    yield stage.end + 1 if reduced.done is None else reduced.done, wait


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
