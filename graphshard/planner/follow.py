"""The collectives of a plan, in its order, placed among other compute.

In: a problem, and the schedules of another one with the same groups (a graph of other ops: other
numbers of sequences in a batch, say). Out: schedules of the problem that issue the same collectives
in the same order, so that ranks may run either beside each other; or None where there are none.
Reductions are issued as soon as the order allows, gathers one ahead, as in FSDP2, or where the
order has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from graphshard.planner.checked import checked
from graphshard.planner.choices import choices_of
from graphshard.planner.compare import placed_as
from graphshard.planner.fsdp2 import fsdp2_choices, fsdp2_placement
from graphshard.planner.memo import Memo
from graphshard.planner.placement import wait_before
from graphshard.planner.plan_step import Planned, as_placed
from graphshard.planner.problem import Problem
from graphshard.planner.stage import (
    REDUCE_ISSUE,
    Placement,
    Reduced,
    Stage,
    gather_positions,
    position_before,
)
from graphshard.schedule.plan import Direction, Schedule, Step, StepKind

_ISSUES = StepKind.GATHER_ISSUE, StepKind.REDUCE_ISSUE


class _UnfitError(Exception):
    """The order cannot be kept."""


def as_fsdp2(problem: Problem) -> Planned:
    """FSDP2's own schedule: ranks whose graphs use the same groups alike come to one order."""
    memo = Memo(checked(problem))
    return as_placed(memo, placed_as(memo, fsdp2_choices(memo.problem)))


def following(
    problem: Problem, schedules: Sequence[Schedule], across: tuple[int, ...]
) -> Planned | None:
    """across: groups that stay gathered between micro-steps, which schedules do not say.

    None as well where nodes hold groups, or the host activations.
    """
    steps = [step for schedule in schedules for step in schedule.steps]
    if problem.offloads or any(s.on_node or s.is_copy for s in steps):
        return None
    memo = Memo(checked(problem))
    ordered = {schedule.direction: schedule.steps for schedule in schedules}
    if list(ordered) != list(memo.problem.directions):
        return None
    try:
        placed = placed_as(memo, choices_of(schedules, across), partial(_in_order, ordered))
    except _UnfitError:
        return None
    return as_placed(memo, placed)


def _in_order(
    ordered: Mapping[Direction, Sequence[Step]], problem: Problem, stage: Stage
) -> Placement:
    steps = [
        step
        for step in ordered[stage.direction]
        if step.kind in (*_ISSUES, StepKind.REDUCE_WAIT) and not step.kept
    ]
    places = _places_of_jobs(stage, steps)
    positions = _issue_positions(stage, steps, places, fsdp2_placement(problem, stage).gathers)
    gathers, reductions = {}, []
    for index, step in enumerate(steps):
        place = places[index]
        if step.kind is StepKind.GATHER_ISSUE:
            gathers[place] = positions[index]
        elif step.kind is StepKind.REDUCE_ISSUE:
            wait = _wait_position(stage, steps, positions, index)
            reductions.append(Reduced(place, positions[index], wait))
    found = tuple(gathers[place] for place in range(len(gathers)))
    if any(early > late for early, late in pairwise(found)):
        raise _UnfitError
    return Placement(found, tuple(reductions))


def _places_of_jobs(stage: Stage, steps: Sequence[Step]) -> list[int]:
    """For each step the index of its job in the stage. Raises _UnfitError unless each has one."""
    jobs = (*enumerate(stage.gathers), *enumerate(stage.reductions))
    known = {job.issue.step.identity: index for index, job in jobs}
    if any(step.identity not in known for step in steps):
        raise _UnfitError
    places = [known[step.identity] for step in steps]
    if len([s for s in steps if s.kind in _ISSUES]) != len(stage.gathers) + len(stage.reductions):
        raise _UnfitError
    return places


def _issue_positions(
    stage: Stage, steps: Sequence[Step], places: Sequence[int], wanted: Sequence[int]
) -> list[int]:
    """Where each issue stands; -1 for waits. wanted: where a gather would be without the order."""
    latest = _latest(stage, steps, places, _earliest_reductions(stage, steps, places))
    positions, before = [], 0
    for step, place, last in zip(steps, places, latest, strict=True):
        if step.kind is StepKind.REDUCE_WAIT:
            positions.append(-1)
            continue
        at = last
        if step.kind is StepKind.GATHER_ISSUE:
            at = min(last, _at_least(stage, max(before, wanted[place])))
        if at < before:
            raise _UnfitError
        positions.append(at)
        before = at
    return positions


def _earliest_reductions(
    stage: Stage, steps: Sequence[Step], places: Sequence[int]
) -> dict[int, int]:
    """By index of the step: when its gradients are ready, and what comes before is issued. A gather
    between two reductions of one slot moves the second one to the next slot."""
    found, before = {}, 0
    for index, step in enumerate(steps):
        if step.kind is StepKind.GATHER_ISSUE:
            before = _at_least(stage, before)
        elif step.kind is StepKind.REDUCE_ISSUE:
            ready = max(before, stage.reductions[places[index]].at)
            before = found[index] = _slot_of_reduction(stage, ready)
    return found


def _slot_of_reduction(stage: Stage, position: int) -> int:
    """The first position from `position` on where a reduction may be issued."""
    slot, phase = divmod(position, stage.stride)
    return (slot + (phase > REDUCE_ISSUE)) * stage.stride + REDUCE_ISSUE


def _latest(
    stage: Stage, steps: Sequence[Step], places: Sequence[int], reductions: Mapping[int, int]
) -> list[int]:
    """The last position of each issue. Raises _UnfitError if there is none."""
    found, bound = [-1] * len(steps), stage.end
    for index in reversed(range(len(steps))):
        if steps[index].kind is StepKind.REDUCE_WAIT:
            continue
        at = reductions.get(index)
        if at is None:
            last = position_before(stage, stage.gathers[places[index]].at)
            at = max((p for p in gather_positions(stage) if p <= min(last, bound)), default=-1)
        if not 0 <= at <= bound:
            raise _UnfitError
        found[index] = bound = at
    return found


def _at_least(stage: Stage, position: int) -> int:
    """The first position from `position` on where a gather may be issued."""
    return next((p for p in gather_positions(stage) if p >= position), stage.end)


def _wait_position(
    stage: Stage, steps: Sequence[Step], positions: Sequence[int], issue: int
) -> int:
    """Before the issue that follows the wait in the order; at the end where none does."""
    own = steps[issue].identity
    waits = (i for i, s in enumerate(steps) if s.kind is StepKind.REDUCE_WAIT and i > issue)
    wait = next((i for i in waits if steps[i].identity == own), len(steps))
    later = next((at for at in positions[wait:] if at >= 0), None)
    if later is None:
        return stage.end
    if later == positions[issue]:  # another reduction that is issued in the same place
        return later - later % stage.stride + REDUCE_ISSUE
    return wait_before(stage, positions[issue], later)
