"""A schedule for tests of passes that needs no cost model: each gather one group ahead."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from plans import ESTIMATE

from graphshard.compiler.planning import apply, place
from graphshard.graph.program import Program
from graphshard.pricing.op_costs import usage_of
from graphshard.pricing.usage import GradReady, GroupUse, Usage
from graphshard.schedule.plan import Direction, Plan, Schedule, Step, StepKind


def scheduled(program: Program) -> tuple[Program, Plan]:
    """A captured program in the order of its plan, and that plan."""
    placed = place(program)
    schedules = [
        one_ahead(usage_of(placed, module.graph, direction))
        for direction, module in placed.by_direction.items()
    ]
    forward, *backward = schedules
    plan = Plan(
        name=placed.name,
        torch_version=torch.__version__,
        groups=placed.groups,
        forward=forward,
        backward=backward[0] if backward else None,
        estimate=ESTIMATE,
    )
    return apply(placed, plan), plan


def one_ahead(usage: Usage) -> Schedule:
    """Gather one group ahead in order of first use; reduce as soon as ready, wait at the end.

    A group is waited for right before its first use; right after that wait the next group's
    gather is issued, when the previous bucket is already copied out. So at most two neighbouring
    groups (and those with longer lives, such as the root) are gathered at any time. A group is
    released right after its last use. A first group that is still gathered from forward costs
    nothing to issue, so the second is issued with it.
    """
    uses = sorted(usage.uses, key=lambda u: (u.first, u.group))
    following = {a.group: b for a, b in pairwise(uses)}
    steps = [_issue(usage, use) for use in uses[:1]]
    if uses[1:] and _is_kept(usage, uses[0]):
        steps.append(_issue(usage, following.pop(uses[0].group)))
    start = 0
    busy = _busy_boundaries(usage)
    for boundary in range(usage.num_ops + 1):
        due = list(_steps_before(usage, following, boundary)) if boundary in busy else []
        if due or boundary == usage.num_ops:
            if boundary > start:
                steps.append(Step(StepKind.COMPUTE, start=start, stop=boundary))
                start = boundary
            steps.extend(due)
    steps.extend(Step(StepKind.REDUCE_WAIT, r.group) for r in _ready_order(usage))
    return Schedule(usage.direction, tuple(steps))


def _busy_boundaries(usage: Usage) -> frozenset[int]:
    firsts = {u.first for u in usage.uses}
    lasts = {u.last + 1 for u in usage.uses if u.last is not None}
    return frozenset(firsts | lasts | {r.after + 1 for r in usage.reductions})


def _steps_before(usage: Usage, following: dict[int, GroupUse], op: int) -> Iterator[Step]:
    """Communication between compute op `op - 1` and compute op `op`.

    following: group -> the use whose gather is issued after that group's wait.
    """
    for use in usage.uses:
        if use.last == op - 1:
            kept = usage.direction is Direction.FORWARD and use.group in usage.kept
            yield Step(StepKind.RELEASE, use.group, kept=kept)
    for ready in _ready_order(usage):
        if ready.after == op - 1:
            yield Step(StepKind.REDUCE_ISSUE, ready.group)
    for use in sorted(usage.uses, key=lambda u: u.group):
        if use.first == op:
            yield Step(StepKind.GATHER_WAIT, use.group, kept=_is_kept(usage, use))
            if use.group in following:
                yield _issue(usage, following[use.group])


def _issue(usage: Usage, use: GroupUse) -> Step:
    return Step(StepKind.GATHER_ISSUE, use.group, kept=_is_kept(usage, use))


def _is_kept(usage: Usage, use: GroupUse) -> bool:
    return usage.direction is Direction.BACKWARD and use.group in usage.kept


def _ready_order(usage: Usage) -> list[GradReady]:
    return sorted(usage.reductions, key=lambda r: (r.after, r.group))
