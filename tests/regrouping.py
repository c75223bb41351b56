"""Plans with other collectives than one per group, made from plans that have one per group."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from graphshard.schedule.plan import GroupInfo, Plan, Schedule, Step, StepKind

GATHER = (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT)
REDUCE = (StepKind.REDUCE_ISSUE, StepKind.REDUCE_WAIT)


def merged(plan: Plan, count: int) -> Plan:
    """Each `count` neighbours travel together; what is kept travels with nobody."""
    return _changed(plan, lambda schedule: _merged(schedule, count))


def split(plan: Plan, count: int) -> Plan:
    """Each group travels in pieces of at most `count` parameters."""
    groups = {g.id: g for g in plan.groups}
    return _changed(
        plan, lambda schedule: (p for s in schedule.steps for p in _blocks(s, groups, count))
    )


def split_reductions(plan: Plan, count: int) -> Plan:
    """Each group's gradients travel in pieces of at most `count` parameters."""
    groups = {g.id: g for g in plan.groups}
    return _changed(
        plan,
        lambda schedule: (p for s in schedule.steps for p in _blocks(s, groups, count, REDUCE)),
    )


def _changed(plan: Plan, steps_of: Callable[[Schedule], Iterable[Step]]) -> Plan:
    forward, *backward = (replace(s, steps=tuple(steps_of(s))) for s in plan.schedules)
    back = backward[0] if backward else None
    # Forecasts and the place of the peak were of the steps before.
    estimate = replace(plan.estimate, ours=replace(plan.estimate.ours, peak_at=None))
    return replace(plan, forward=forward, backward=back, forecasts=(), estimate=estimate)


def _merged(schedule: Schedule, count: int) -> Iterator[Step]:
    order = [s.group for s in schedule.of_kind(StepKind.GATHER_ISSUE) if not s.kept]
    lots = {order[i]: tuple(order[i : i + count]) for i in range(0, len(order), count)}
    followers = {group for first, lot in lots.items() for group in lot if group != first}
    for step in schedule.steps:
        if step.kind not in GATHER or step.kept:
            yield step
        elif step.group not in followers:
            yield replace(step, with_groups=lots[step.group][1:])


def _blocks(
    step: Step,
    groups: dict[int, GroupInfo],
    count: int,
    kinds: tuple[StepKind, StepKind] = GATHER,
) -> Iterator[Step]:
    size = len(groups[step.group].params) if step.kind in kinds and not step.kept else 0
    if size <= count:
        yield step
        return
    for start in range(0, size, count):
        yield replace(step, params=tuple(range(start, min(start + count, size))))
