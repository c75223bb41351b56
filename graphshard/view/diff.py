"""Two plans of one model, or a plan and what was measured of it: what differs, and why.

In come two scenarios; out comes a `Diff`: the figures of both, what moved in the schedules, and
contributions to the difference of the step time. These are by group: its compute, its copies into
and out of buckets, its exposed waits; and the optimizer. They add up to the whole difference; what
medians or further micro-steps leave over is a contribution of its own (`REST`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from graphshard.errors import MeasureError
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate, Plan
from graphshard.schedule.steps import StepKind
from graphshard.view.moves import MoveRow, moves
from graphshard.view.names import shown
from graphshard.view.optimizer import name_text
from graphshard.view.scenario import Scenario, measured, predicted

COMPUTE, COPIES, WAITS, REST = "compute", "copies", "exposed", "not of one part"
OPTIMIZER = "optimizer"
# What is measured of a step.
PASSES = "forward and backward"
# Microseconds by kind and name.
Parts: TypeAlias = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One number of both sides; None where a side does not know it."""

    name: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Contribution:
    """A part of the step on both sides, in microseconds. kind: COMPUTE, COPIES, WAITS, OPTIMIZER or
    REST."""

    kind: str
    name: str
    before_us: float
    after_us: float

    @property
    def change_us(self) -> float:
        return self.after_us - self.before_us


@dataclass(frozen=True, slots=True)
class Diff:
    """before, after: what the sides are called. contributions: largest change first; all of them
    together are the change of `step_time`."""

    before: str
    after: str
    step_time_us: ComparedFigure
    exposed_us: ComparedFigure
    peak_bytes: ComparedFigure
    moves: tuple[MoveRow, ...]
    contributions: tuple[Contribution, ...]


def diff(before: Plan, after: Plan) -> Diff:
    """Two plans of one model.

    Raises MeasureError: GS805 for plans of different models, GS803 for a plan without times.
    """
    before, after = shown(before), shown(after)
    check_same_model(before, after)
    sides = _predicted(before), _predicted(after)
    estimates = [plan.estimate for plan in (before, after)]
    optimizers = _optimizers(*estimates)
    step_us = [
        (side.us if e is None else e.step_time_us) + sum(own.values())
        for side, e, own in zip(sides, estimates, optimizers, strict=True)
    ]
    exposed_us = [
        s.exposed_us if e is None else e.exposed_us for s, e in zip(sides, estimates, strict=True)
    ]
    peaks = [None if e is None else e.peak_bytes for e in estimates]
    name = "step time" if optimizers[0] else PASSES
    step_time_us = ComparedFigure(name, *step_us)
    return Diff(
        before="before",
        after="after",
        step_time_us=step_time_us,
        exposed_us=ComparedFigure("exposed communication", *exposed_us),
        peak_bytes=ComparedFigure("peak memory", *peaks),
        moves=tuple(moves(before, after)),
        contributions=contributions(*sides, step_time_us, optimizers),
    )


def _optimizers(before: Estimate, after: Estimate) -> tuple[Parts, Parts]:
    """What each side's optimizer takes; nothing unless both are known."""
    if before.optimizer is None or after.optimizer is None:
        return {}, {}
    both = before.optimizer, after.optimizer
    name = " and ".join(dict.fromkeys(map(name_text, both)))
    first, second = ({(OPTIMIZER, name): own.us} for own in both)
    return first, second


def diff_measured(plan: Plan, found: Measured) -> Diff:
    """A plan's prediction against what one micro-step of it was measured at.

    Raises MeasureError (GS803) for a plan without times, (GS805) if the regions are not the plan's.
    """
    plan = shown(plan)
    own = _predicted(plan)
    try:
        plan.compare(found)
    except ValueError as error:
        raise MeasureError("GS805", f"what was measured is not of {plan.name}: {error}") from error
    step_time_us = ComparedFigure(PASSES, own.us, found.step_time_us)
    peak_bytes = plan.estimate.peak_bytes
    return Diff(
        before="predicted",
        after="measured",
        step_time_us=step_time_us,
        exposed_us=ComparedFigure("exposed communication", own.exposed_us, found.exposed_us),
        peak_bytes=ComparedFigure("peak memory", peak_bytes, None),
        moves=(),
        contributions=contributions(own, measured(plan, found), step_time_us),
    )


def _predicted(plan: Plan) -> Scenario:
    try:
        return predicted(plan)
    except ValueError as error:
        raise MeasureError("GS803", str(error)) from error


def contributions(
    before: Scenario,
    after: Scenario,
    step_time_us: ComparedFigure,
    more: tuple[Parts, Parts] = ({}, {}),
) -> tuple[Contribution, ...]:
    """What parts of both scenarios changed, largest change first, with what they leave over. more:
    parts that are not in the scenarios."""
    ours, theirs = {**_parts(before), **more[0]}, {**_parts(after), **more[1]}
    found = [
        Contribution(*key, ours.get(key, 0.0), theirs.get(key, 0.0))
        for key in dict.fromkeys([*ours, *theirs])
    ]
    rest = [
        (total or 0.0) - sum(parts.values())
        for total, parts in ((step_time_us.before, ours), (step_time_us.after, theirs))
    ]
    found.append(Contribution(REST, "medians, other micro-steps", *rest))
    changed = [part for part in found if part.change_us != 0]
    return tuple(sorted(changed, key=lambda part: -abs(part.change_us)))


def _parts(scenario: Scenario) -> Parts:
    """Microseconds by kind and name."""
    parts: dict[tuple[str, str], float] = {}
    for work in scenario.works:
        kind = COMPUTE if work.step.kind is StepKind.COMPUTE else COPIES
        name = work.where if kind == COMPUTE else f"{work.direction} {_short(work.where)}"
        for key, us in (((kind, name), work.us), ((WAITS, name), work.exposed_us)):
            if us:
                parts[key] = parts.get(key, 0.0) + us
    return parts


def _short(name: str) -> str:
    """ "graphshard::all_gather_wait layers.3" as "all_gather layers.3": an issue and its wait."""
    return name.removeprefix("graphshard::").replace("_wait ", " ")


def check_same_model(before: Plan, after: Plan) -> None:
    """Groups and the shapes of their parameters. Raises MeasureError (GS805) for the first that
    differs."""
    ours, theirs = dict(_shapes(before)), dict(_shapes(after))
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            sides = (f"{shape or 'not there'}" for shape in (ours.get(name), theirs.get(name)))
            text = f"these are plans of different models: {name} is {' and '.join(sides)}"
            raise MeasureError("GS805", text)
    directions = [[str(s.direction) for s in plan.schedules] for plan in (before, after)]
    if directions[0] != directions[1]:
        text = " and ".join(" + ".join(one) for one in directions)
        raise MeasureError("GS805", f"these are plans of different graphs: {text}")


def _shapes(plan: Plan) -> Iterator[tuple[str, str]]:
    for group in plan.groups:
        for param in group.params:
            yield f"{param.fqn} of group {group.fqn}", "x".join(map(str, param.shape)) or "scalar"
