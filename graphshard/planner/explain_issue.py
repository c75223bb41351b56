"""Why each collective of a plan is not issued earlier.

One reason per issue of the last micro-step, the first of these that holds: what the user bound;
nothing to wait for (it is not exposed); its lane is busy; memory is missing before; its gradients
come no earlier, or its direction starts there (program order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from graphshard.planner.events import Event, given_gradients, micro_steps_of, start_allocations
from graphshard.planner.fsdp2 import has_lists
from graphshard.planner.memo import Memo
from graphshard.planner.problem import Problem
from graphshard.planner.score import Candidate, SearchContext
from graphshard.planner.simulate import LaneCollective, Simulation, owners_at
from graphshard.planner.stage import assemble, stage_of
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Category, Direction, StepKind
from graphshard.schedule.reasons import Bound, Held, NotEarlier

OWNERS = 2


@dataclass(frozen=True, slots=True)
class TimedEvents:
    """The events of one direction, with the bytes alive during each of them."""

    direction: Direction
    start: tuple[Allocation, ...]
    events: tuple[Event, ...]
    alive_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Memory is missing right before an issue; held: the most that others hold there."""

    missing_bytes: int
    held: tuple[Held, ...]


def why_not_earlier(
    context: SearchContext, best: Candidate, ours: Simulation
) -> Iterator[NotEarlier]:
    """One reason for each collective of `ours`, in order."""
    lines = {line.direction: line for line in _lines(context.memo, best)}
    for direction, line in lines.items():
        own = [c for c in ours.collectives if c.direction is direction]
        places = [i for i, event in enumerate(line.events) if event.lane >= 0]
        blocked = _blocked(line, places, context.budget_bytes)
        lanes: dict[int, LaneCollective] = {}
        for place, found in zip(places, own, strict=True):
            yield _reason(context.problem, line, place, found, lanes.get(found.lane), blocked)
            lanes[found.lane] = found


def _lines(memo: Memo, best: Candidate) -> Iterator[TimedEvents]:
    problem = memo.problem
    micro = micro_steps_of(problem)[-1][0]
    start = start_allocations(problem, best.choices, micro)
    for direction, scored in zip(problem.directions, best.directions, strict=True):
        if direction is Direction.BACKWARD:
            start += given_gradients(problem)
        events = assemble(stage_of(memo, best.choices, direction, micro), scored.placement)
        alive, held = [], sum(c.bytes for c in start)
        for event in events:
            held += event.alloc_bytes
            alive.append(held + event.brief_bytes)
            held -= event.free_bytes
        yield TimedEvents(direction, start, tuple(events), tuple(alive))
        start = tuple(owners_at(start, events, len(events)))


def _reason(
    problem: Problem,
    line: TimedEvents,
    place: int,
    found: LaneCollective,
    before: LaneCollective | None,
    blocked: dict[int, Blocked],
) -> NotEarlier:
    step, exposed_us = found.step, found.exposed_us
    assert step.group is not None
    because = partial(NotEarlier, step.group, line.direction, step.kind, exposed_us=exposed_us)
    gather = step.kind in (StepKind.GATHER_ISSUE, StepKind.RELOAD_ISSUE)
    if step.kind is StepKind.GATHER_ISSUE and has_lists(problem, line.direction):
        return because(Bound.PREFETCH_LISTS)
    if exposed_us == 0:
        return because(Bound.NO_NEED, spare_us=found.awaited_us - found.finished_us)
    if before is not None and before.finished_us > found.issued_us:
        return because(
            Bound.LANE_BUSY,
            busy_kind=before.step.kind,
            busy=before.step.groups,
            until_us=before.finished_us,
        )
    if place in blocked:
        why = blocked[place]
        return because(Bound.MEMORY, missing_bytes=why.missing_bytes, held=why.held)
    if step.kind is StepKind.OFFLOAD_ISSUE:
        return because(Bound.ACTIVATIONS)
    if not gather:
        all_reduces = step.kind is StepKind.ALL_REDUCE_ISSUE
        return because(Bound.REDUCED if all_reduces else Bound.GRADIENTS)
    if not any(e.step.kind is StepKind.COMPUTE for e in line.events[:place]):
        return because(Bound.FIRST)
    if before is not None and before.finished_us == found.started_us:
        return because(Bound.LANE_FREE)
    return because(Bound.NOT_SHORTER)


def _blocked(line: TimedEvents, places: Sequence[int], budget_bytes: int) -> dict[int, Blocked]:
    """By the place of the issue; places: of all issues."""
    fullest = {place: _no_room_at(line, place, budget_bytes) for place in places}
    moments = {place: moment for place, moment in fullest.items() if moment is not None}
    tops = _tops(line, sorted(set(moments.values())))
    return {
        place: Blocked(_missing_bytes(line, place, moment, budget_bytes), tops[moment])
        for place, moment in moments.items()
    }


def _no_room_at(line: TimedEvents, place: int, budget_bytes: int) -> int | None:
    """The event that keeps a gather from being issued before it, if memory does.

    Looked at are the events back to the last region, which is where the issue could have been. A
    reduction cannot be issued before its gradients are complete.
    """
    if line.events[place].step.kind not in (StepKind.GATHER_ISSUE, StepKind.RELOAD_ISSUE):
        return None
    for earlier in range(place - 1, -1, -1):
        if _missing_bytes(line, place, earlier, budget_bytes) > 0:
            return earlier
        if line.events[earlier].step.kind is StepKind.COMPUTE:
            return None
    return None


def _missing_bytes(line: TimedEvents, place: int, earlier: int, budget_bytes: int) -> int:
    return line.alive_bytes[earlier] + line.events[place].alloc_bytes - budget_bytes


def _tops(line: TimedEvents, moments: Sequence[int]) -> dict[int, tuple[Held, ...]]:
    """The largest owners of memory during some events."""
    held: Counter[tuple[Category, int]] = Counter()
    for allocation in line.start:
        held[_owner(allocation)] += allocation.bytes
    found: dict[int, tuple[Held, ...]] = {}
    moments_left = list(reversed(moments))
    for index, event in enumerate(line.events):
        for allocation in event.takes:
            held[_owner(allocation)] += allocation.bytes
        if moments_left and moments_left[-1] == index:
            found[moments_left.pop()] = _most_held(held)
        for allocation in event.gives:
            held[_owner(allocation)] -= allocation.bytes
    return found


def _owner(allocation: Allocation) -> tuple[Category, int]:
    return allocation.category, -1 if allocation.group is None else allocation.group


def _most_held(held: Counter[tuple[Category, int]]) -> tuple[Held, ...]:
    sums: Counter[Category] = Counter()
    for (category, _), amount in held.items():
        sums[category] += amount
    order = sorted(sums.items(), key=lambda kv: (-kv[1], kv[0]))[:OWNERS]
    return tuple(Held(category, amount) for category, amount in order)
