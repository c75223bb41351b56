"""Where a measured step differs from the predicted one: rows that add up to the difference.

In comes a `Sheet`; out come `Miss`es. Nothing for a plan that was not measured or has no costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphshard.schedule.plan import Baseline, Direction, StepKind
from graphshard.view.scenario import measured_course
from graphshard.view.sheet import Sheet
from graphshard.view.units import time_text

COMPUTE, COPIES, WAITS = "compute", "copies and launches", "waits"


@dataclass(frozen=True, slots=True)
class Miss:
    """A part of the step. way: of the measured one, "better" or "worse" than predicted; "" for the
    whole and for what is as predicted."""

    name: str
    predicted: str
    measured: str
    change: str
    way: str


def misses(sheet: Sheet) -> list[Miss]:
    """The largest difference first, then the whole."""
    found, plan = sheet.measured, sheet.plan
    if found is None or not plan.forecasts:
        return []
    own = _parts(Baseline(plan.schedules, plan.forecasts))
    seen = _parts(measured_course(plan, found))
    pairs = [
        (f"{part} in {direction}", own[direction, part], seen[direction, part])
        for direction in Direction
        for part in (COMPUTE, COPIES, WAITS)
    ]
    rest = found.step_time_us - sum(seen.values())
    name = "not attributed (medians of parts do not add up)" if rest >= 0 else "parts that overlap"
    pairs.append((name, 0.0, rest))
    pairs.sort(key=lambda row: -abs(row[2] - row[1]))
    whole = ("forward and backward", sum(own.values()), found.step_time_us)
    return [*_rows(pair for pair in pairs if any(pair[1:])), *_rows([whole])]


def _parts(course: Baseline) -> defaultdict[tuple[Direction, str], float]:
    """Microseconds of the compute lane, by what they are."""
    found: defaultdict[tuple[Direction, str], float] = defaultdict(float)
    for schedule, forecast in zip(course.schedules, course.forecasts, strict=True):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            part = COMPUTE if step.kind is StepKind.COMPUTE else COPIES
            found[schedule.direction, part] += time.work_us
            found[schedule.direction, WAITS] += time.exposed_us
    return found


def _rows(pairs: Iterable[tuple[str, float, float]]) -> Iterator[Miss]:
    for name, own_us, seen_us in pairs:
        more_us = seen_us - own_us
        way = "" if round(more_us, 3) == 0 else "worse" if more_us > 0 else "better"
        sign = "+" if more_us > 0 else "-"
        change = f"{sign}{time_text(abs(more_us))}" if way else ""
        yield Miss(name, time_text(own_us), _signed(seen_us), change, way)


def _signed(us: float) -> str:
    return time_text(us) if us >= 0 else f"-{time_text(-us)}"
