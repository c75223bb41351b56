"""Why each collective of a plan is not issued earlier.

One reason per issue of the last micro-step, the first of these that holds: what the user bound;
nothing to wait for (it is not exposed); its lane is busy; memory is missing before; its gradients
come no earlier, or its direction starts there (program order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.planner.events import Event, given_gradients, start_claims, turns
from graphshard.planner.fsdp2 import has_lists
from graphshard.planner.memo import Memo
from graphshard.planner.problem import Claim, Problem
from graphshard.planner.score import Candidate, SearchContext
from graphshard.planner.simulate import LaneCollective, Simulation, owners_at
from graphshard.planner.stage import assemble, stage_of
from graphshard.schedule.plan import Category, Direction, Reason, Step, StepKind

OWNERS = 2


@dataclass(frozen=True, slots=True)
class TimedEvents:
    """The events of one direction, with the bytes alive during each of them."""

    direction: Direction
    start: tuple[Claim, ...]
    events: tuple[Event, ...]
    alive_bytes: tuple[int, ...]


def why_not_earlier(context: SearchContext, best: Candidate, ours: Simulation) -> Iterator[Reason]:
    """One reason for each collective of `ours`, in order."""
    lines = {line.direction: line for line in _lines(context.memo, best)}
    for direction, line in lines.items():
        own = [c for c in ours.collectives if c.direction is direction]
        places = [i for i, event in enumerate(line.events) if event.lane >= 0]
        held = _blockers(line, places, context.budget_bytes)
        lanes: dict[int, LaneCollective] = {}
        for place, found in zip(places, own, strict=True):
            text = _text(context.problem, line, place, found, lanes.get(found.lane), held)
            yield Reason(str(found.step.kind), text, group=found.step.group, direction=direction)
            lanes[found.lane] = found


def _lines(memo: Memo, best: Candidate) -> Iterator[TimedEvents]:
    problem = memo.problem
    turn = turns(problem)[-1][0]
    start = start_claims(problem, best.choices, turn)
    for direction, scored in zip(problem.directions, best.directions, strict=True):
        if direction is Direction.BACKWARD:
            start += given_gradients(problem)
        events = assemble(stage_of(memo, best.choices, direction, turn), scored.placement)
        alive, held = [], sum(c.bytes for c in start)
        for event in events:
            held += event.alloc_bytes
            alive.append(held + event.brief_bytes)
            held -= event.free_bytes
        yield TimedEvents(direction, start, tuple(events), tuple(alive))
        start = tuple(owners_at(start, events, len(events)))


def _text(
    problem: Problem,
    line: TimedEvents,
    place: int,
    found: LaneCollective,
    before: LaneCollective | None,
    held: dict[int, tuple[int, str]],
) -> str:
    gather = found.step.kind is StepKind.GATHER_ISSUE
    if gather and has_lists(problem, line.direction):
        return "bound by the user's prefetch lists"
    if found.exposed_us == 0:
        spare_us = found.awaited_us - found.finished_us
        return f"no need: it is done {spare_us:,.3f} us before compute waits for it"
    cost = f"compute waits {found.exposed_us:,.3f} us for it, but "
    if before is not None and before.finished_us > found.issued_us:
        name, until = _step_text(problem, before.step), before.finished_us
        return cost + f"the lane is busy with {name} until {until:,.3f} us of {line.direction}"
    if place in held:
        missing, text = held[place]
        return cost + f"{missing:,} bytes of the budget are missing before: {text}"
    if not gather:
        return cost + "its gradients are complete only here"
    if not any(e.step.kind is StepKind.COMPUTE for e in line.events[:place]):
        return cost + "nothing computes before it"
    if before is not None and before.finished_us == found.started_us:
        return cost + "it starts as soon as its lane is free"
    return cost + "an earlier issue did not make the simulated step shorter"


def _step_text(problem: Problem, step: Step) -> str:
    kind = "the gather" if step.kind is StepKind.GATHER_ISSUE else "the reduction"
    names = [problem.groups[number].fqn or "the root" for number in step.groups]
    return f"{kind} of {', '.join(names)}"


def _blockers(
    line: TimedEvents, places: Sequence[int], budget_bytes: int
) -> dict[int, tuple[int, str]]:
    """Issue -> bytes missing right before it, and who holds what is there.

    Looked at is the stretch of events back to the last wait or region, which is where the issue
    could have been; a reduction cannot be issued before its gradients are complete.
    """
    wanted: dict[int, tuple[int, int]] = {}
    for place in places:
        event = line.events[place]
        if event.step.kind is not StepKind.GATHER_ISSUE:
            continue
        for earlier in range(place - 1, -1, -1):
            missing = line.alive_bytes[earlier] + event.alloc_bytes - budget_bytes
            if missing > 0:
                wanted[place] = (missing, earlier)
                break
            if line.events[earlier].step.kind is StepKind.COMPUTE:
                break
    tops = _tops(line, sorted({earlier for _, earlier in wanted.values()}))
    return {place: (missing, tops[at]) for place, (missing, at) in wanted.items()}


def _tops(line: TimedEvents, moments: Sequence[int]) -> dict[int, str]:
    """The largest owners of memory during some events."""
    held: Counter[tuple[Category, int]] = Counter()
    for claim in line.start:
        held[_owner(claim)] += claim.bytes
    found: dict[int, str] = {}
    moments_left = list(reversed(moments))
    for index, event in enumerate(line.events):
        for claim in event.takes:
            held[_owner(claim)] += claim.bytes
        if moments_left and moments_left[-1] == index:
            found[moments_left.pop()] = _held_text(held)
        for claim in event.gives:
            held[_owner(claim)] -= claim.bytes
    return found


def _owner(claim: Claim) -> tuple[Category, int]:
    return claim.category, -1 if claim.group is None else claim.group


def _held_text(held: Counter[tuple[Category, int]]) -> str:
    sums: Counter[Category] = Counter()
    for (category, _), amount in held.items():
        sums[category] += amount
    order = sorted(sums.items(), key=lambda kv: (-kv[1], kv[0]))[:OWNERS]
    return ", ".join(f"{category} holds {amount:,}" for category, amount in order)
