"""A plan as the short block that a run logs: what it costs, where it waits and why.

In come a plan and, if there is one, what was measured; out comes plain text of a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Baseline, Plan
from graphshard.schedule.reasons import NotEarlier
from graphshard.schedule.steps import ISSUES, range_name
from graphshard.view.names import shown
from graphshard.view.optimizer import step_line
from graphshard.view.reasons import reason_text
from graphshard.view.recomputed import recomputed_text
from graphshard.view.scenario import Carried, Scenario, predicted
from graphshard.view.text import bytes_text, collectives_text, count_text, group_names
from graphshard.view.units import change_text, time_text

MOST_WAITS = 5


def log_text(plan: Plan, measured: Measured | None = None) -> str:
    """measured: of this plan, or of the one that ran before it."""
    plan = shown(plan)
    s = plan.summary()
    lines = [
        f"{plan.name}: {count_text(s.groups, 'group')}, {collectives_text(s)} per step, at most "
        f"{bytes_text(s.gathered_peak_bytes)} of gathered parameters"
    ]
    if again := recomputed_text(plan):
        lines.append(f"  {again}")
    if plan.forecasts:
        lines += _costs(plan, predicted(plan))
    if measured is not None:
        error = "" if plan.measured is None else _error(plan, measured)
        whose = "measured" if plan.measured is not None else "measured before this plan"
        share = _share(measured.exposed_us, measured.step_time_us)
        lines.append(
            f"  {whose}: forward and backward {time_text(measured.step_time_us)}{error}, exposed "
            f"{time_text(measured.exposed_us)} ({share})"
        )
    return "\n".join(lines)


def collective_names(plan: Plan) -> Iterator[str]:
    """Every collective of a step in the order of issue, as profiles call it."""
    fqns = {group.id: group.fqn for group in plan.groups}
    for schedule in plan.schedules:
        for step in schedule.of_kind(*ISSUES):
            if not step.kept:
                yield range_name(step.kind, [fqns[group] for group in step.groups], step.params)


def _costs(plan: Plan, own: Scenario) -> Iterator[str]:
    comm_us = sum(carried.end_us - carried.start_us for carried in own.collectives)
    compute_us = own.us - own.exposed_us
    theirs = "" if plan.fsdp2 is None else f"; FSDP2 {time_text(_us(plan.fsdp2))}"
    if (estimate := plan.estimate) is not None and estimate.optimizer is not None:
        yield f"  predicted: {step_line(estimate)}"
    yield (
        f"  predicted: forward and backward {time_text(own.us)}, compute {time_text(compute_us)}, "
        f"communication {time_text(comm_us)}, exposed {time_text(own.exposed_us)} "
        f"({_share(own.exposed_us, own.us)}){theirs}"
    )
    waits = [(own.works[c.wait].exposed_us, c) for c in own.collectives if c.wait is not None]
    waits = [(us, carried) for us, carried in waits if us > 0]
    waits.sort(key=lambda pair: -pair[0])
    for us, carried in waits[:MOST_WAITS]:
        name = carried.name.removeprefix("graphshard::")
        why = _reason(plan, own, carried)
        yield f"  exposed {time_text(us)}: {name} in {carried.entry.direction}{why and ': '}{why}"
    if len(waits) > MOST_WAITS:
        yield f"  and {count_text(len(waits) - MOST_WAITS, 'more wait')}"


def _reason(plan: Plan, own: Scenario, carried: Carried) -> str:
    """Why the collective is not issued earlier."""
    issue = own.works[carried.issue]
    found = (
        reason_text(reason, group_names(plan))
        for reason in plan.reasons
        if isinstance(reason, NotEarlier)
        and reason.kind is issue.step.kind
        and reason.group == issue.step.group
        and reason.direction is issue.direction
    )
    return next(found, "")


def _us(course: Baseline) -> float:
    return sum(forecast.us for forecast in course.forecasts)


def _error(plan: Plan, measured: Measured) -> str:
    if not plan.forecasts:
        return ""
    return f" ({change_text(measured.step_time_us, predicted(plan).us)} against predicted)"


def _share(part_us: float, whole_us: float) -> str:
    return f"{part_us / whole_us:.1%}" if whole_us else "0.0%"
