"""Predicted against measured: each region, each collective, exposed time and the whole step.

In come schedules with their forecasts and what was measured; out comes a `Comparison`. Measured
may be another order of the same graph (the plan before this one): regions and collectives are
matched by what they do, not by their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from graphshard.schedule.forecast import Forecast
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.steps import ISSUES, Direction, Schedule, Step, StepIdentity, StepKind


@dataclass(frozen=True, slots=True)
class Pair:
    """Microseconds, predicted and measured."""

    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None if nothing was measured."""
        if self.measured_us == 0:
            return None
        return (self.predicted_us - self.measured_us) / self.measured_us


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One region of compute, or one collective on its lane (`step` is its issue)."""

    direction: Direction
    step: Step
    us: Pair


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole step. Exposed time is that of all waits of a direction together.

    num_steps: steps measured. regions, collectives: in the order of the schedule, forward first.
    A collective is left out where one of both sides has none or did not see its end.
    """

    num_steps: int
    step_time: Pair
    exposed: Pair
    exposed_by_direction: tuple[tuple[Direction, Pair], ...]
    regions: tuple[ComparisonRow, ...]
    collectives: tuple[ComparisonRow, ...]

    @property
    def region_error(self) -> float | None:
        """Median of the regions' absolute relative errors."""
        return _median_error(self.regions)

    @property
    def collective_error(self) -> float | None:
        """Median of the collectives' absolute relative errors."""
        return _median_error(self.collectives)


def compare(plan: Sequence[tuple[Schedule, Forecast]], measured: Measured) -> Comparison:
    """Raises ValueError if there is no forecast, or if the regions are not those measured."""
    if not plan:
        raise ValueError("this plan has no forecasts of its steps")
    exposed: list[tuple[Direction, Pair]] = []
    regions: list[ComparisonRow] = []
    collectives: list[ComparisonRow] = []
    for schedule, forecast in plan:
        own = measured.of(schedule.direction)
        exposed.append((schedule.direction, _exposed(forecast, own)))
        regions += _regions(schedule, forecast, own)
        collectives += _collectives(schedule, forecast, own)
    predicted_us = sum(forecast.us for _, forecast in plan)
    return Comparison(
        num_steps=measured.num_steps,
        step_time=Pair(predicted_us, measured.step_time_us),
        exposed=_sum([pair for _, pair in exposed]),
        exposed_by_direction=tuple(exposed),
        regions=tuple(regions),
        collectives=tuple(collectives),
    )


def _exposed(forecast: Forecast, own: Sequence[Segment]) -> Pair:
    return Pair(forecast.exposed_us, sum(s.exposed_us for s in own))


def _sum(pairs: Sequence[Pair]) -> Pair:
    return Pair(sum(p.predicted_us for p in pairs), sum(p.measured_us for p in pairs))


def _regions(
    schedule: Schedule, forecast: Forecast, own: Sequence[Segment]
) -> Iterator[ComparisonRow]:
    """Measured segments may be finer than the regions of the schedule, never coarser."""
    compute = [s for s in own if s.step.kind is StepKind.COMPUTE]
    done_us = {0: 0.0}
    for segment in compute:
        done_us[segment.step.stop] = done_us[segment.step.start] + segment.us
    for step, time in zip(schedule.steps, forecast.steps, strict=True):
        if step.kind is not StepKind.COMPUTE:
            continue
        if not {step.start, step.stop} <= done_us.keys():
            where = f"ops {step.start} to {step.stop} of {schedule.direction}"
            raise ValueError(f"these are not times of this graph: nothing ends at {where}")
        measured_us = done_us[step.stop] - done_us[step.start]
        yield ComparisonRow(schedule.direction, step, Pair(time.work_us, measured_us))


def _collectives(
    schedule: Schedule, forecast: Forecast, own: Sequence[Segment]
) -> Iterator[ComparisonRow]:
    seen: Mapping[StepIdentity, float] = {
        s.step.identity: s.comm_us for s in own if s.step.kind in ISSUES and s.comm_us is not None
    }
    for found in forecast.collectives:
        step = schedule.steps[found.issue]
        comm_us = seen.get(step.identity)
        if comm_us is not None:
            yield ComparisonRow(schedule.direction, step, Pair(found.us, comm_us))


def _median_error(rows: Sequence[ComparisonRow]) -> float | None:
    errors = [abs(row.us.error) for row in rows if row.us.error is not None]
    return median(errors) if errors else None
