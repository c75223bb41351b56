"""What the cost model expects of each step of a schedule, and of each collective on its lane.

Plain values with a JSON form, without the steps themselves: entry i of `Forecast.steps` belongs to
step i of the schedule. All times count in microseconds from the start of the direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphshard.files.decode import Amount, Count
from graphshard.schedule.estimate import Category


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step on the compute lane, reached at `start_us`: first it waits `exposed_us` for its
    collective (only a wait does), then it works for `work_us`."""

    start_us: Amount
    work_us: Amount
    exposed_us: Amount = 0.0

    @property
    def end_us(self) -> float:
        return self.start_us + self.exposed_us + self.work_us


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The collective that step `issue` starts, on lane `lane`: an in-order queue of its own.

    lane: index of the process group, in the order in which the planner numbers them. It is issued
    when compute has done step `issue`, and starts when the lane is free.
    """

    issue: Count
    lane: Count
    start_us: Amount
    end_us: Amount

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class Forecast:
    """One direction of a micro-step that gathers and reduces everything its schedule says.

    memory: bytes alive during each step, by category; the categories that never hold any are left
    out.
    """

    steps: tuple[StepTime, ...]
    collectives: tuple[CollectiveTime, ...]
    memory: tuple[tuple[Category, tuple[int, ...]], ...] = ()

    @property
    def us(self) -> float:
        return self.steps[-1].end_us if self.steps else 0.0

    @property
    def exposed_us(self) -> float:
        return sum(step.exposed_us for step in self.steps)

    @property
    def alive_bytes(self) -> tuple[int, ...]:
        """All categories together, during each step."""
        columns = [sizes for _, sizes in self.memory]
        return tuple(map(sum, zip(*columns, strict=True))) if columns else (0,) * len(self.steps)


def knows_memory(forecasts: Iterable[Forecast]) -> bool:
    """False for plans without sizes: there `alive_bytes` is 0 throughout."""
    return any(forecast.memory for forecast in forecasts)
