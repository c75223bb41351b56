"""The shared axis: where each step of a course lies, in microseconds or in program order.

In come schedules, with their forecasts where the plan has any. Out comes an `Axis`: forward, then
backward, on one line. With forecasts its unit is the microsecond from the start of forward;
without, it runs from 0 to 1 in program order and nothing on it is a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.forecast import Forecast
from graphshard.schedule.plan import Schedule
from graphshard.view.timeline import axis_edges


@dataclass(frozen=True, slots=True)
class Axis:
    """Step i is reached at `reached[i]`, goes on at `begun[i]` (later only if it waits), and is
    over at `done[i]`, where the next one is reached. divider: where backward begins, if there is
    one. end: where the last step is over."""

    timed: bool
    reached: tuple[float, ...]
    begun: tuple[float, ...]
    done: tuple[float, ...]
    divider: float | None

    @property
    def end(self) -> float:
        return self.done[-1] if self.done else 0.0

    def step_at(self, place: float) -> int:
        """The step on the compute lane at `place`; of several at one place, the last."""
        return max(bisect_right(self.reached, place) - 1, 0)


def axis_of(schedules: Sequence[Schedule], forecasts: Sequence[Forecast]) -> Axis:
    """forecasts: one per schedule, or none at all."""
    num_forward = len(schedules[0].steps)
    if not forecasts:
        edges = axis_edges([step for schedule in schedules for step in schedule.steps])
        divider = edges[num_forward] if len(schedules) > 1 else None
        return Axis(False, edges[:-1], edges[:-1], edges[1:], divider)
    spans = list(_spans(forecasts))
    reached, begun, done = ([span[place] for span in spans] for place in range(3))
    divider = forecasts[0].us if len(schedules) > 1 else None
    return Axis(True, tuple(reached), tuple(begun), tuple(done), divider)


def _spans(forecasts: Sequence[Forecast]) -> Iterator[tuple[float, float, float]]:
    for offset_us, forecast in zip(offsets_us(forecasts), forecasts, strict=True):
        for time in forecast.steps:
            start_us = offset_us + time.start_us
            yield start_us, start_us + time.exposed_us, offset_us + time.end_us


def offsets_us(forecasts: Sequence[Forecast]) -> list[float]:
    """When each direction begins."""
    return [sum(f.us for f in forecasts[:place]) for place in range(len(forecasts))]
