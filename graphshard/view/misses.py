"""Where a measured step differs from the predicted one: rows that add up to the difference.

In comes a `Sheet`; out come `Miss`es. Nothing for a plan that was not measured or has no costs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Baseline, Direction, StepKind
from graphshard.view.scenario import measured_course
from graphshard.view.sheet import Sheet
from graphshard.view.units import time_text


class Part(StrEnum):
    """Of the compute lane of a step; each but the last three in each direction."""

    COMPUTE = "compute"
    COPIES = "copies and launches"
    WAITS = "waits"
    VARYING = "waits that differ from step to step"
    UNATTRIBUTED = "not attributed"
    OVERLAPPING = "parts that overlap"


MEANINGS = {
    Part.COMPUTE: "kernels between two collectives, of the rank that takes longest",
    Part.COPIES: "the host issues collectives, and buckets are filled and emptied; on a CPU also "
    "what the transport takes of the cores meanwhile",
    Part.WAITS: "compute waits for a collective, on the rank that waits least",
    Part.VARYING: "of whole steps, compute waits so much longer than the medians of single waits: "
    "one that comes in two steps of five has the median 0",
    Part.UNATTRIBUTED: "the whole step took so much longer than its parts: the host, other "
    "processes, and medians that do not add up",
    Part.OVERLAPPING: "the slowest rank of each part is not always the same one, so that parts add "
    "up to more than a step",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """A part of the step. way: of the measured one, "better" or "worse" than predicted; "" for the
    whole and for what is as predicted. meaning: of the part, in words; empty for the whole."""

    name: str
    predicted: str
    measured: str
    change: str
    way: str
    meaning: str = ""


def misses(sheet: Sheet) -> list[Miss]:
    """The largest difference first, then the whole."""
    found, plan = sheet.measured, sheet.plan
    if found is None or not plan.forecasts:
        return []
    own = _parts(Baseline(plan.schedules, plan.forecasts))
    seen = _parts(measured_course(plan, found))
    every: list[tuple[Part, Direction | None, float, float]] = [
        (part, direction, own[direction, part], seen[direction, part])
        for direction in Direction
        for part in (Part.COMPUTE, Part.COPIES, Part.WAITS)
    ]
    varying_us = varying_waits_us(found)
    rest_us = found.step_time_us - sum(seen.values()) - varying_us
    rest = Part.UNATTRIBUTED if rest_us >= 0 else Part.OVERLAPPING
    every += [(Part.VARYING, None, 0.0, varying_us), (rest, None, 0.0, rest_us)]
    every.sort(key=lambda row: -abs(row[3] - row[2]))
    rows = [
        _miss(f"{part} in {direction}" if direction else str(part), own_us, seen_us, MEANINGS[part])
        for part, direction, own_us, seen_us in every
        if round(own_us, 3) or round(seen_us, 3)
    ]
    return [*rows, _miss("forward and backward", sum(own.values()), found.step_time_us)]


def varying_waits_us(found: Measured) -> float:
    """Exposed time of a whole measured step, less the exposed times of its waits."""
    parts_us = sum(s.exposed_us for d in Direction for s in found.of(d))
    return found.exposed_us - parts_us


def _parts(course: Baseline) -> defaultdict[tuple[Direction, Part], float]:
    """Microseconds of the compute lane, by what they are."""
    found: defaultdict[tuple[Direction, Part], float] = defaultdict(float)
    for schedule, forecast in zip(course.schedules, course.forecasts, strict=True):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            part = Part.COMPUTE if step.kind is StepKind.COMPUTE else Part.COPIES
            found[schedule.direction, part] += time.work_us
            found[schedule.direction, Part.WAITS] += time.exposed_us
    return found


def _miss(name: str, own_us: float, seen_us: float, meaning: str = "") -> Miss:
    more_us = seen_us - own_us
    way = "" if round(more_us, 3) == 0 else "worse" if more_us > 0 else "better"
    sign = "+" if more_us > 0 else "-"
    change = f"{sign}{time_text(abs(more_us))}" if way else ""
    return Miss(name, time_text(own_us), _signed(seen_us), change, way, meaning)


def _signed(us: float) -> str:
    return time_text(us) if us >= 0 else f"-{time_text(-us)}"
