"""A schedule with its forecast: the critical path, and the same order with other times.

The rules are those of `graphshard.planner.simulate`: compute follows the steps, a collective starts
when compute has done its issue and its lane is free (an all-reduce also not before its
reduce-scatter is done), a wait holds compute until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graphshard.schedule.forecast import CollectiveTime, Forecast
from graphshard.schedule.steps import ISSUE_OF, Schedule, Step, StepKind


@dataclass(frozen=True, slots=True)
class Replayed:
    """Microseconds of one direction."""

    us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What a direction's time consists of: work on the compute lane, and these collectives.

    Its parts add up to `Forecast.us`. All other work is hidden behind them.
    """

    work_us: float
    collectives: tuple[CollectiveTime, ...]


def replayed(
    schedule: Schedule,
    forecast: Forecast,
    work_us: Callable[[Step, float], float],
    comm_us: Callable[[CollectiveTime], float],
) -> Replayed:
    """The same order of steps where each takes what the two functions say."""
    awaited, follows = _awaited(schedule, forecast), _follows(schedule, forecast)
    issued = {found.issue: found for found in forecast.collectives}
    clock = exposed = 0.0
    free_at: dict[int, float] = {}
    done_at: dict[int, float] = {}
    for index, (step, time) in enumerate(zip(schedule.steps, forecast.steps, strict=True)):
        if index in awaited:
            waited = max(0.0, done_at[awaited[index].issue] - clock)
            exposed, clock = exposed + waited, clock + waited
        clock += work_us(step, time.work_us)
        if index in issued:
            found = issued[index]
            first = follows.get(index)
            ready = clock if first is None else max(clock, done_at[first.issue])
            end = max(ready, free_at.get(found.lane, 0.0)) + comm_us(found)
            done_at[index] = free_at[found.lane] = end
    return Replayed(clock, exposed)


def critical_path(schedule: Schedule, forecast: Forecast) -> CriticalPath:
    """Found backwards from the end: a step that waited goes on with the collective it waited for,
    and a collective that stood in its lane with the one before it, or with its reduce-scatter."""
    awaited, follows = _awaited(schedule, forecast), _follows(schedule, forecast)
    work_us, found = 0.0, []
    index = len(schedule.steps) - 1
    while index >= 0:
        time = forecast.steps[index]
        work_us += time.work_us
        if time.exposed_us > 0:
            chain = list(_chain(forecast, awaited[index], follows))
            found += chain
            index = chain[-1].issue
        else:
            index -= 1
    return CriticalPath(work_us, tuple(reversed(found)))


def _chain(
    forecast: Forecast, last: CollectiveTime, follows: Mapping[int, CollectiveTime]
) -> Iterator[CollectiveTime]:
    """`last` and the collectives that it stood behind, backwards."""
    yield last
    while last.start_us > forecast.steps[last.issue].end_us:
        before = follows.get(last.issue)
        if before is None or before.end_us < last.start_us:
            own = [c for c in forecast.collectives if c.lane == last.lane and c.issue < last.issue]
            before = own[-1] if own else None
        if before is None:
            return
        yield before
        last = before


def _follows(schedule: Schedule, forecast: Forecast) -> Mapping[int, CollectiveTime]:
    """Index of the issue of an all-reduce -> its reduce-scatter, if that is a collective."""
    steps = schedule.steps
    issued = {
        steps[c.issue].groups: c
        for c in forecast.collectives
        if steps[c.issue].kind is StepKind.REDUCE_ISSUE
    }
    keys = ((i, s.groups) for i, s in enumerate(steps) if s.kind is StepKind.ALL_REDUCE_ISSUE)
    return {index: issued[groups] for index, groups in keys if groups in issued}


def _awaited(schedule: Schedule, forecast: Forecast) -> Mapping[int, CollectiveTime]:
    """Index of a waiting step -> the collective that it waits for."""
    steps = schedule.steps
    open_ = {steps[c.issue].identity: c for c in forecast.collectives}
    keys = ((i, s.identity) for i, s in enumerate(steps) if s.kind in ISSUE_OF)
    return {index: open_[key] for index, key in keys if key in open_}
