"""What choices cost when every job is placed as well as the budget allows.

Forward and backward are placed apart: no collective is in flight between them, and all that they
share are the bytes that one hands to the other, which choices alone decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from graphshard.planner.choices import Choices, offloads_of
from graphshard.planner.events import (
    MicroStep,
    given_gradients,
    micro_steps_of,
    start_allocations,
    total_bytes,
)
from graphshard.planner.fsdp2 import has_lists, listed_positions, with_buffers
from graphshard.planner.memo import Memo, once
from graphshard.planner.memory import MemoryProfile, View, profile_of, view_of
from graphshard.planner.placement import UNLIMITED, FillPolicy, fill
from graphshard.planner.problem import Problem
from graphshard.planner.simulate import play
from graphshard.planner.stage import Placement, Stage, assemble, stage_of, stages_of
from graphshard.planner.waits import prompt_waits
from graphshard.schedule.plan import Direction

# Reduction buffers that gathers leave room for, and gathers in flight where both share a lane.
BUFFERS = (UNLIMITED, 0, 1, 2, 4, 8)
AHEAD = (UNLIMITED, 1, 2, 3)
ROOM = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Scored:
    """One placed direction: time of all micro-steps together, and the peak of any."""

    us: float
    peak_bytes: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Candidate:
    """Placed choices, one `Scored` per direction."""

    choices: Choices
    directions: tuple[Scored, ...]

    @property
    def us(self) -> float:
        return sum(d.us for d in self.directions)

    @property
    def peak_bytes(self) -> int:
        return max(d.peak_bytes for d in self.directions)

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller is better: time, then memory."""
        return self.us, self.peak_bytes


@dataclass(slots=True)
class SearchContext:
    """A problem under a budget, with everything already found out about it.

    effort: events played so far. It bounds the search by work instead of by time, so that the
    result does not depend on the machine. enough_us: a step that is good enough.
    """

    memo: Memo
    budget_bytes: int
    enough_us: float = 0.0
    effort: int = 0
    policies: dict[Direction, tuple[FillPolicy, ...]] = field(default_factory=dict)
    scores: dict[tuple[object, ...], Scored | None] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        return self.memo.problem


def candidate(context: SearchContext, choices: Choices) -> Candidate | None:
    """`choices` placed as well as the budget allows, or None if they do not fit, or compute
    something again without what it needs."""
    if not means_something(context.problem, choices):
        return None
    found = []
    for direction in context.problem.directions:
        scored = _scored(context, choices, direction)
        if scored is None:
            return None
        found.append(scored)
    return Candidate(choices, tuple(found))


def fits(context: SearchContext, choices: Choices) -> bool:
    """Whether `candidate` finds something, in a third of the time. Rarely it does not: a reduction
    that is waited for where it was issued is so behind a gather that needs its memory."""
    if any(has_lists(context.problem, direction) for direction in context.problem.directions):
        return candidate(context, choices) is not None
    return means_something(context.problem, choices) and all(
        _fits(context, choices, direction) for direction in context.problem.directions
    )


def _fits(context: SearchContext, choices: Choices, direction: Direction) -> bool:
    stages = stages_of(context.memo, choices, direction)
    profile = profile_of(context.problem, stages, start_bytes(context, choices, direction))
    rooms = dict.fromkeys(policy.room for policy in _policies(context, direction))
    return any(view_of(profile, context.budget_bytes, room) is not None for room in rooms)


def means_something(problem: Problem, choices: Choices) -> bool:
    """What is computed again needs others that are, nothing is offloaded too, and the host has
    room."""
    again = [problem.recompute[index] for index in choices.recompute]
    if not {option.needs for option in again}.issubset({None, *choices.recompute}):
        return False
    if not choices.offload:
        return True
    away = {problem.offload_options[index].activation for index in choices.offload}
    assert problem.host is not None
    if not away.isdisjoint(option.activation for option in again):
        return False
    limit_bytes = problem.host.limit_bytes
    return limit_bytes is None or sum(o.bytes for o in offloads_of(problem, choices)) <= limit_bytes


def _scored(context: SearchContext, choices: Choices, direction: Direction) -> Scored | None:
    forward = direction is Direction.FORWARD
    own = (choices.forward,) if forward else (choices.backward, choices.reduce, choices.delays)
    stays = choices.kept, choices.across, choices.on_node
    key = (direction, stays, choices.recompute, choices.offload, own)
    if key not in context.scores:
        context.scores[key] = place(context, choices, direction)
    return context.scores[key]


def place(context: SearchContext, choices: Choices, direction: Direction) -> Scored | None:
    """The best of what the policies give."""
    found = (scored for _, scored in placed_by_each(context, choices, direction))
    return min(found, key=lambda scored: (scored.us, scored.peak_bytes), default=None)


def placed_by_each(
    context: SearchContext, choices: Choices, direction: Direction
) -> Iterator[tuple[FillPolicy, Scored]]:
    """What fits the budget, without repetition, with the first policy that gives it."""
    stages = stages_of(context.memo, choices, direction)
    starts = start_bytes(context, choices, direction)
    profile = profile_of(context.problem, stages, starts)
    for policy, placement in _placements(context, stages, profile, _policies(context, direction)):
        scored = score(context, stages, starts, placement)
        if scored.peak_bytes <= context.budget_bytes:
            yield policy, scored


def _policies(context: SearchContext, direction: Direction) -> tuple[FillPolicy, ...]:
    return context.policies.get(direction) or all_policies(context.problem, direction)


def _placements(
    context: SearchContext,
    stages: Sequence[Stage],
    profile: MemoryProfile,
    policies: tuple[FillPolicy, ...],
) -> Iterator[tuple[FillPolicy, Placement]]:
    stage, last = stages[0], stages[-1]
    seen: set[Placement] = set()
    filled: set[Placement] = set()
    views: dict[int, View | None] = {}
    for policy in policies:
        if has_lists(context.problem, stage.direction):
            gathers = listed_positions(context.problem, stage)
            placement = Placement(gathers, with_buffers(stage, policy.buffers))
        else:
            if policy.room not in views:
                views[policy.room] = view_of(profile, context.budget_bytes, policy.room)
            view = views[policy.room]
            if view is None:
                continue
            placement = fill(stage, profile, view, context.budget_bytes, policy)
        if placement in filled:  # another policy gave it
            continue
        filled.add(placement)
        for own in dict.fromkeys((placement, prompt_waits(context.problem, last, placement))):
            if own not in seen:
                seen.add(own)
                yield policy, own


def score(
    context: SearchContext, stages: list[Stage], starts: list[int], placement: Placement
) -> Scored:
    """Time over all micro-steps and the peak of `placement`, whether it fits or not."""
    us, peak = 0.0, 0
    for (_, times), stage, start in zip(
        micro_steps_of(context.problem), stages, starts, strict=True
    ):
        events = assemble(stage, placement)
        context.effort += len(events)
        run = play(events, start, context.problem.lanes)
        us += times * run.us
        peak = max(peak, run.peak_bytes)
    return Scored(us, peak, placement)


def start_bytes(context: SearchContext, choices: Choices, direction: Direction) -> list[int]:
    """What is in memory when the direction starts, for each micro-step."""
    problem = context.problem
    starts = [
        total_bytes(start_allocations(problem, choices, micro))
        for micro, _ in micro_steps_of(problem)
    ]
    if direction is Direction.FORWARD:
        return starts
    given = total_bytes(given_gradients(problem))
    handed = _handed_over(context, choices)
    return [start + over + given for start, over in zip(starts, handed, strict=True)]


def _handed_over(context: SearchContext, choices: Choices) -> list[int]:
    """What forward leaves in memory: activations and what stays gathered."""
    found = []
    for micro, _ in micro_steps_of(context.problem):

        def left(micro: MicroStep = micro) -> int:
            stage = stage_of(context.memo, choices, Direction.FORWARD, micro)
            events = [*(e for _, e in stage.fixed), *(j.issue for j in stage.gathers)]
            return sum(e.alloc_bytes - e.free_bytes for e in events)

        stays = choices.kept, choices.across, choices.on_node
        key = ("handed over", micro, stays, choices.recompute, choices.offload)
        found.append(once(context.memo, key, left))
    return found


def all_policies(problem: Problem, direction: Direction) -> tuple[FillPolicy, ...]:
    """Every policy worth trying. Gathers hold back only for reductions on their own lane."""
    most = UNLIMITED if problem.most_ahead is None else problem.most_ahead
    if direction is Direction.FORWARD:
        copies = problem.offloads or problem.offload_options
        return tuple(FillPolicy(most, buffers) for buffers in (BUFFERS if copies else BUFFERS[:1]))
    lanes = {g.lane_in(direction) for g in problem.groups}
    lanes |= {g.node.lane for g in problem.groups if g.node is not None}
    shared = any(g.reduce_lane in lanes for g in problem.groups)
    ahead = dict.fromkeys(min(most, count) for count in (AHEAD if shared else AHEAD[:2]))
    return tuple(FillPolicy(*values) for values in product(ahead, BUFFERS, ROOM))


def most_frugal(problem: Problem, direction: Direction) -> FillPolicy:
    """One gather in flight; of all policies, it fits where any of them does, or nearly so."""
    policies = all_policies(problem, direction)
    return min(policies, key=lambda policy: (policy.gathers, policy.buffers, policy.room))
