"""Exact time and memory of a schedule.

In come a problem and the schedule of each direction; out comes a `Simulation`. The rules: the host
runs the steps in order and compute follows it; a collective starts as soon as compute has reached
its issue, every earlier collective of its lane is done, and so is the one that it follows; a wait
holds compute until its collective is done. Memory follows the order of the steps alone, since every
buffer is allocated and freed on the compute queue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from graphshard.errors import PlanError
from graphshard.planner.choices import Bucket, Choices, choices_of, offloads_of
from graphshard.planner.events import (
    Event,
    MicroStep,
    all_reduce_events,
    gather_events,
    given_gradients,
    micro_steps_of,
    offload_events,
    reduce_events,
    release_event,
    reload_events,
    start_allocations,
    total_bytes,
)
from graphshard.planner.links import LaneQueues
from graphshard.planner.problem import Category, CollectiveLane, Problem
from graphshard.planner.regions import region_events
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Direction, Lane, Plan, Schedule, Step, StepKind
from graphshard.schedule.steps import ISSUES


@dataclass(frozen=True, slots=True)
class LaneCollective:
    """One collective on its lane. All times count from the start of its direction.

    issued_us: compute reached its issue (copy-in done). exposed_us: compute waited this long.
    """

    direction: Direction
    step: Step
    lane: int
    issued_us: float
    started_us: float
    finished_us: float
    awaited_us: float

    @property
    def exposed_us(self) -> float:
        return max(0.0, self.finished_us - self.awaited_us)

    @property
    def queued_us(self) -> float:
        """How long it stood behind earlier collectives of its lane."""
        return self.started_us - self.issued_us


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment with the most memory: during `step` (number `index`) of `direction`.

    by_category and owners add up to `bytes`, largest first.
    """

    bytes: int
    direction: Direction
    step: Step
    index: int
    owners: tuple[Allocation, ...]

    @property
    def by_category(self) -> tuple[tuple[Category, int], ...]:
        sums: Counter[Category] = Counter()
        for allocation in self.owners:
            sums[allocation.category] += allocation.bytes
        return tuple(sorted(sums.items(), key=lambda kv: (-kv[1], kv[0])))


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step costs. Times are of a whole step; details are of its last micro-step.

    timeline: by direction, when compute reaches each step, from the direction's start.
    """

    step_us: float
    exposed_us: float
    peak: Peak
    collectives: tuple[LaneCollective, ...]
    timeline: tuple[tuple[tuple[Step, float], ...], ...]

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes


@dataclass(slots=True)
class Played:
    """What `play` found: one entry of `reached_us` per event, one of the others per job."""

    us: float
    exposed_us: float
    peak_bytes: int
    peak_at: int
    end_bytes: int
    reached_us: list[float]
    issued_us: dict[int, float]
    started_us: dict[int, float]
    finished_us: dict[int, float]


def play(events: Iterable[Event], start_bytes: int, lanes: Sequence[CollectiveLane]) -> Played:
    """Run `events` in order. Raises PlanError (GS603) for a wait without its issue."""
    clock = exposed = 0.0
    held, peak, peak_at = start_bytes, start_bytes, 0
    queues = LaneQueues(lanes)
    reached: list[float] = []
    issued: dict[int, float] = {}
    for index, event in enumerate(events):
        reached.append(clock)
        job = event.job
        if job >= 0 and event.lane < 0:  # a wait
            done_us = queues.end_us(job)
            if done_us is None:
                raise PlanError("GS603", f"{event.step} comes before its issue")
            if done_us > clock:
                exposed += done_us - clock
                clock = done_us
        clock += event.us
        if event.lane >= 0:
            issued[job] = clock
            queues.issue(job, event.lane, event.comm_us, clock, event.after)
        held += event.alloc_bytes
        if held + event.brief_bytes > peak:
            peak, peak_at = held + event.brief_bytes, index
        held -= event.free_bytes
    started, finished = queues.started_us, queues.finished_us
    return Played(clock, exposed, peak, peak_at, held, reached, issued, started, finished)


def simulate(
    problem: Problem,
    schedules: Sequence[Schedule],
    recompute: tuple[int, ...] = (),
    across: tuple[int, ...] = (),
    offload: tuple[int, ...] = (),
) -> Simulation:
    """`schedules`: one per direction of `problem`. Raises PlanError (GS603) if one does not fit.

    recompute, offload: indices of the options taken. across: groups kept gathered between
    micro-steps.
    """
    choices = replace(choices_of(schedules, across), recompute=recompute, offload=offload)
    programs = {
        micro: [events_of(problem, schedule, choices, micro) for schedule in schedules]
        for micro, _ in micro_steps_of(problem)
    }
    return report(problem, choices, programs)


def simulated_as(problem: Problem, plan: Plan) -> Simulation:
    """`plan` at the costs of `problem`, which has its regions and groups."""
    chosen, away = set(plan.recompute.activations), set(plan.recompute.offloaded)
    again = tuple(i for i, o in enumerate(problem.recompute) if o.activation in chosen)
    offload = tuple(i for i, o in enumerate(problem.offload_options) if o.activation in away)
    return simulate(problem, plan.schedules, again, plan.across, offload)


def report(
    problem: Problem, choices: Choices, programs: dict[MicroStep, list[list[Event]]]
) -> Simulation:
    """The simulation of the events of each micro-step, one list per direction."""
    step_us = exposed_us = 0.0
    peaks: list[Peak] = []
    runs: list[Played] = []
    for micro, times in micro_steps_of(problem):
        start = start_allocations(problem, choices, micro)
        runs = []
        for direction, events in zip(problem.directions, programs[micro], strict=True):
            if direction is Direction.BACKWARD:
                start += given_gradients(problem)
            run = play(events, total_bytes(start), problem.lanes)
            runs.append(run)
            step_us += times * run.us
            exposed_us += times * run.exposed_us
            peaks.append(_peak(run, direction, start, events))
            start = tuple(owners_at(start, events, len(events)))
    last = programs[micro_steps_of(problem)[-1][0]]
    return Simulation(
        step_us,
        exposed_us,
        max(peaks, key=lambda p: p.bytes),
        tuple(chain.from_iterable(map(_collectives, problem.directions, last, runs))),
        tuple(
            tuple(zip((e.step for e in events), run.reached_us, strict=True))
            for events, run in zip(last, runs, strict=True)
        ),
    )


def _peak(
    run: Played, direction: Direction, start: tuple[Allocation, ...], events: list[Event]
) -> Peak:
    owners = owners_at(start, events, run.peak_at, inside=True)
    order = sorted(owners, key=lambda c: (-c.bytes, c.category, -1 if c.group is None else c.group))
    at = run.peak_at
    return Peak(run.peak_bytes, direction, events[at].step, at, tuple(order))


def owners_at(
    start: tuple[Allocation, ...], events: list[Event], stop: int, *, inside: bool = False
) -> list[Allocation]:
    """Who holds memory before event `stop`, or (`inside`) during it."""
    held: Counter[tuple[Category, int | None]] = Counter()
    for allocation in start:
        held[allocation.category, allocation.group] += allocation.bytes
    for event in events[:stop]:
        for allocation in event.takes:
            held[allocation.category, allocation.group] += allocation.bytes
        for allocation in event.gives:
            held[allocation.category, allocation.group] -= allocation.bytes
    for event in events[stop : stop + 1] if inside else ():
        for allocation in (*event.takes, *event.briefly):
            held[allocation.category, allocation.group] += allocation.bytes
    return [Allocation(category, size, group) for (category, group), size in held.items() if size]


def _collectives(direction: Direction, events: list[Event], run: Played) -> list[LaneCollective]:
    awaited = {e.job: t for e, t in zip(events, run.reached_us, strict=True) if e.lane < 0}
    return [
        LaneCollective(
            direction,
            event.step,
            event.lane,
            run.issued_us[event.job],
            run.started_us[event.job],
            run.finished_us[event.job],
            awaited[event.job],
        )
        for event in events
        if event.lane >= 0
    ]


# -- from steps to events ------------------------------------------------------------------------


def events_of(
    problem: Problem, schedule: Schedule, choices: Choices, micro: MicroStep
) -> list[Event]:
    """The steps of `schedule` with their costs in micro-step `micro`."""
    regions = deque(region_events(problem, choices, schedule.direction))
    events: list[Event] = []
    for step in schedule.steps:
        if step.kind is StepKind.COMPUTE:
            events.extend(_covered(regions, step))
        else:
            events.append(_event(problem, schedule.direction, step, choices, micro))
    if regions:
        raise PlanError("GS603", f"{schedule.direction} leaves out {len(regions)} regions")
    return events


def _covered(regions: deque[Event], step: Step) -> Iterator[Event]:
    """The regions that a compute step runs, taken off `regions`."""
    done = step.start
    while done < step.stop and regions and regions[0].step.start == done:
        done = regions[0].step.stop
        yield regions.popleft()
    if done != step.stop:
        raise PlanError("GS603", f"{step} does not cover the next regions from end to end")


def _event(
    problem: Problem, direction: Direction, step: Step, choices: Choices, micro: MicroStep
) -> Event:
    if step.group is None or step.group >= len(problem.groups):
        raise PlanError("GS603", f"{step} names no group of the problem")
    if step.kind is StepKind.RELEASE:
        is_left = step.group in choices.across and not micro.last
        return release_event(problem, step.group, choices, direction, is_left=is_left)
    if step.is_copy:
        return _copy_event(problem, step, choices)
    bucket = Bucket(step.groups, _parts(problem, step))
    issues = step.kind in ISSUES
    if step.kind in (StepKind.REDUCE_ISSUE, StepKind.REDUCE_WAIT):
        return reduce_events(problem, bucket, micro)[0 if issues else 1]
    if step.lane is Lane.ALL_REDUCE:
        found = all_reduce_events(problem, bucket, micro)
        if found is None:
            raise PlanError("GS603", f"{step} is of a group without replicas")
        return found[0 if issues else 1]
    carried = direction is Direction.FORWARD and not micro.first and step.group in choices.across
    resident = step.kept or carried
    events = gather_events(problem, bucket, direction, resident=resident, on_node=step.on_node)
    return events[0 if issues else 1]


def _copy_event(problem: Problem, step: Step, choices: Choices) -> Event:
    found = [o for o in offloads_of(problem, choices) if o.group == step.group]
    if not found:
        raise PlanError("GS603", f"{step} copies what the problem does not offload")
    events = offload_events if step.lane is Lane.OFFLOAD else reload_events
    return events(problem, found[0])[0 if step.kind in ISSUES else 1]


def _parts(problem: Problem, step: Step) -> tuple[int, ...]:
    assert step.group is not None
    parts = problem.groups[step.group].parts
    return tuple(i for i, part in enumerate(parts) if step.params and part.params[0] in step.params)
