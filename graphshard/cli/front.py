"""The picture of a sweep over budgets: what the plans take, and what the model takes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphshard.view.front import Panel, Series, Spot

if TYPE_CHECKING:
    from graphshard.offline.point import Answer, Point

NO_LIMIT = 2**60
PLANS = "planned, one for each budget"
AS_IT_IS = "FSDP2's order, as the model is"
NOTHING_AGAIN = "FSDP2's order, nothing computed again"


def marked(points: Sequence[Point]) -> list[Point]:
    """Two for each model of a sweep, in FSDP2's own order: as it is, and with nothing computed
    again."""
    from graphshard.pricing.problem import PlanningPolicy  # imports torch

    found = []
    for point in {_key(point): point for point in points}.values():
        theirs = point.policy
        own = PlanningPolicy(
            NO_LIMIT,
            most_ahead=1,
            micro_steps=theirs.micro_steps,
            optimizer=theirs.optimizer,
        )
        nothing = replace(own, replaces_checkpoints=True)
        found += [replace(point, policy=own), replace(point, policy=nothing)]
    return found


def panels(name: str, answers: Sequence[Answer], marks: Sequence[Answer]) -> list[Panel]:
    """One for each world, machine and size of inputs of which a plan fits. marks: the answers to
    `marked`."""
    found = []
    for as_it_is, nothing in zip(marks[::2], marks[1::2], strict=True):
        own = [a for a in answers if _key(a.point) == _key(as_it_is.point)]
        series = [Series(PLANS, tuple(spot for a in own for spot in _spots(a)))]
        for title, mark in ((AS_IT_IS, as_it_is), (NOTHING_AGAIN, nothing)):
            series.append(Series(title, tuple(_spots(mark))))
        if series[0].spots:
            found.append(Panel(_title(name, as_it_is.point), tuple(series)))
    return found


def _spots(answer: Answer) -> list[Spot]:
    if answer.plan is None:
        return []
    estimate = answer.plan.estimate
    return [Spot(estimate.peak_bytes, estimate.whole_step_us)]


def _title(name: str, point: Point) -> str:
    sizes = ", ".join(f"{key} {value:,}" for key, value in point.sizes)
    parts = (name, f"{point.world_size:,} x {point.machine.name}", sizes)
    return ", ".join(part for part in parts if part)


def _key(point: Point) -> tuple[object, ...]:
    return point.world_size, point.machine.name, point.sizes
