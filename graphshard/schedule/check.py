"""What no type says about the parts of a plan: names, places and orders that have to fit together.

In come parts of a decoded plan; out come faults, each as "place: what is wrong", none if whoever
reads the parts may trust them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from graphshard.schedule.estimate import Figures
from graphshard.schedule.forecast import Forecast
from graphshard.schedule.groups import GroupInfo
from graphshard.schedule.steps import ISSUE_OF, ISSUES, Direction, Schedule, Step, StepKind

Groups = Mapping[int, GroupInfo]


def group_faults(groups: Sequence[GroupInfo]) -> Iterator[str]:
    """Every group has a number of its own."""
    seen: set[int] = set()
    for place, group in enumerate(groups):
        if group.id in seen:
            yield f"groups[{place}].id: another group has the number {group.id}"
        seen.add(group.id)


def step_faults(groups: Groups, steps: Sequence[Step], place: str) -> Iterator[str]:
    """Steps name groups and parameters that there are; what is issued is awaited later; compute
    goes on where it stopped. place: of the list, such as "forward.steps"."""
    issued: dict[object, int] = {}
    awaited: set[object] = set()
    done = 0
    for index, step in enumerate(steps):
        for text in _step_faults(groups, step, done, issued):
            yield f"{place}[{index}]{text}"
        if step.kind is StepKind.COMPUTE:
            done = step.stop
        elif step.kind in ISSUES:
            issued[step.identity] = index
        elif step.kind in ISSUE_OF:
            awaited.add(step.identity)
    for identity, index in issued.items():
        if identity not in awaited:
            yield f"{place}[{index}]: nothing waits for it"


def _step_faults(groups: Groups, step: Step, done: int, issued: Container[object]) -> Iterator[str]:
    if step.kind is StepKind.COMPUTE:
        if step.group is not None or step.with_groups or step.params:
            yield ": compute is of no group"
        if step.start != done or step.stop < step.start:
            yield f": expected ops from {done} on, found {step.start} to {step.stop}"
        return
    if step.group is None:
        yield f": {step.kind} is of a group, and names none"
        return
    for number in step.groups:
        if number not in groups:
            yield f".group: there is no group {number}"
            return
    if len(set(step.groups)) < len(step.groups):
        yield ".with_groups: a group travels twice"
    count = len(groups[step.group].params)
    for number in step.params:
        if number >= count or step.params.count(number) > 1:
            yield f".params: parameter {number} of {count} (the first is 0), or named twice"
    if step.kind in ISSUE_OF and step.identity not in issued:
        yield f": {step.kind} of group {step.group} comes before its issue"
    if step.kind in ISSUES and step.identity in issued:
        yield f": {step.kind} of group {step.group} comes a second time"


def course_faults(
    groups: Groups,
    places: Sequence[str],
    schedules: Sequence[Schedule],
    forecasts: Sequence[Forecast],
) -> Iterator[str]:
    """Schedules of forward and, if there is one, backward; for each a forecast, or none at all.

    places: of each schedule; forecasts stand beside them.
    """
    if not 1 <= len(schedules) <= len(Direction):
        yield f"{places[0]}: expected one schedule per direction, found {len(schedules)}"
        return
    for place, schedule, direction in zip(places, schedules, Direction, strict=False):
        if schedule.direction is not direction:
            yield f"{place}.direction: expected {direction}, found {schedule.direction}"
        yield from step_faults(groups, schedule.steps, f"{place}.steps")
    if forecasts and len(forecasts) != len(schedules):
        yield f"forecasts: expected {len(schedules)}, found {len(forecasts)}"
        return
    for index, (schedule, forecast) in enumerate(zip(schedules, forecasts, strict=False)):
        for text in _forecast_faults(schedule, forecast):
            yield f"forecasts[{index}].{text}"


def _forecast_faults(schedule: Schedule, forecast: Forecast) -> Iterator[str]:
    steps = schedule.steps
    if len(forecast.steps) != len(steps):
        yield f"steps: expected {len(steps)}, one per step, found {len(forecast.steps)}"
        return
    seen: set[object] = set()
    for index, found in enumerate(forecast.collectives):
        if found.issue >= len(steps) or steps[found.issue].kind not in ISSUES:
            yield f"collectives[{index}].issue: step {found.issue} issues nothing"
            return
        if found.end_us < found.start_us:
            yield f"collectives[{index}].end_us: it ends before it starts"
        issue = steps[found.issue]
        if issue.identity in seen:
            yield f"collectives[{index}].issue: step {found.issue} is named twice"
        seen.add(issue.identity)
    for index, (step, time) in enumerate(zip(steps, forecast.steps, strict=True)):
        awaits = step.kind in ISSUE_OF and step.identity in seen
        if time.exposed_us > 0 and not awaits:
            yield f"steps[{index}].exposed_us: it waits for no collective"
    for index, (_, sizes) in enumerate(forecast.memory):
        if len(sizes) != len(steps):
            yield f"memory[{index}]: expected {len(steps)} sizes, one per step, found {len(sizes)}"


def figure_faults(groups: Groups, schedules: Sequence[Schedule], own: Figures) -> Iterator[str]:
    """The moment and the owners of the peak are known."""
    lengths = {schedule.direction: len(schedule.steps) for schedule in schedules}
    at = own.peak_at
    if at is not None and at.step >= lengths.get(at.direction, 0):
        yield f"peak_at: there is no step {at.step} of {at.direction}"
    for index, owner in enumerate(own.peak_owners):
        if owner.group is not None and owner.group not in groups:
            yield f"peak_owners[{index}].group: there is no group {owner.group}"
