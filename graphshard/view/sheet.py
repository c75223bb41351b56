"""What all views of one plan share: its rows, its axis, its names, and its collectives in full.

In comes a plan, and what was measured of it, if anything. Out comes a `Sheet`; the views read it
and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphshard.schedule.forecast import CollectiveTime, knows_memory
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Direction, Lane, Plan, Step, StepKind
from graphshard.schedule.reasons import NotEarlier
from graphshard.schedule.signature import SignatureEntry
from graphshard.view.axis import Axis, axis_of, offsets_us
from graphshard.view.text import bytes_text, group_name
from graphshard.view.timeline import LaneSegment, Timeline, timeline
from graphshard.view.units import time_text


@dataclass(frozen=True, slots=True)
class CollectiveBar:
    """One collective on its lane. issue, wait: numbers of its steps (wait None: not in this plan).

    start, end: on the axis; without times they are the places of issue and wait. lane: number of
    its process group, or of its kind where there are no times. row: as in `Segment`. exposed_us:
    how long compute waits for it. slack_us: done so long before compute waits; None if it is not
    waited for, or without times.
    """

    step: Step
    direction: Direction
    entry: SignatureEntry
    issue: int
    wait: int | None
    lane: int
    row: int
    start: float
    end: float
    exposed_us: float = 0.0
    slack_us: float | None = None


@dataclass(frozen=True, slots=True)
class Sheet:
    """alive_bytes: during each step, forward steps first; all memory, or where that is not known
    the gathered parameters. measured_us: of regions and collectives, by their step. not_earlier: by
    group, direction and kind of the issue."""

    plan: Plan
    rows: Timeline
    axis: Axis
    names: Mapping[int, str]
    collectives: tuple[CollectiveBar, ...]
    alive_bytes: tuple[int, ...]
    measured: Measured | None
    measured_us: Mapping[tuple[Direction, Step], float]
    not_earlier: Mapping[tuple[int, Direction, StepKind], tuple[NotEarlier, ...]]

    def place_text(self, place: float) -> str:
        """Where on the axis, in words."""
        return time_text(place) if self.axis.timed else f"step {self.axis.step_at(place)}"

    @property
    def by_category(self) -> bool:
        """All memory is known, by category; else only that of gathered parameters."""
        return knows_memory(self.plan.forecasts)

    @property
    def alive_word(self) -> str:
        """What `alive_bytes` counts."""
        return "memory" if self.by_category else "gathered"

    def alive_text(self, step: int) -> str:
        return bytes_text(self.alive_bytes[step])


def sheet_of(plan: Plan, measured: Measured | None = None) -> Sheet:
    """Raises ValueError if `measured` is of another graph than the plan."""
    rows = timeline(plan)
    axis = axis_of(plan.schedules, plan.forecasts)
    alive = [size for forecast in plan.forecasts for size in forecast.alive_bytes]
    return Sheet(
        plan=plan,
        rows=rows,
        axis=axis,
        names={g.id: group_name(g) for g in plan.groups},
        collectives=tuple(_collectives(plan, rows, axis)),
        alive_bytes=tuple(alive) if knows_memory(plan.forecasts) else rows.gathered_bytes,
        measured=measured,
        measured_us=_measured_us(plan, measured),
        not_earlier=_not_earlier(plan),
    )


def _not_earlier(plan: Plan) -> dict[tuple[int, Direction, StepKind], tuple[NotEarlier, ...]]:
    """The parts of a split group have one each."""
    found: dict[tuple[int, Direction, StepKind], tuple[NotEarlier, ...]] = {}
    for reason in plan.reasons:
        if isinstance(reason, NotEarlier):
            key = reason.group, reason.direction, reason.kind
            found[key] = (*found.get(key, ()), reason)
    return found


def _measured_us(plan: Plan, measured: Measured | None) -> dict[tuple[Direction, Step], float]:
    if measured is None or not plan.forecasts:
        return {}
    found = plan.compare(measured)
    both = (*found.regions, *found.collectives)
    return {(row.direction, row.step): row.us.measured_us for row in both}


def _collectives(plan: Plan, rows: Timeline, axis: Axis) -> Iterator[CollectiveBar]:
    """Copies to and from the host too, in the order of issue, forward first."""
    found = [s for lane in rows.lanes for s in lane.segments if s.group is not None and not s.kept]
    found.sort(key=lambda s: s.first)
    timed = dict(_timed(plan))
    for segment in found:
        wait = segment.last if segment.awaited else None
        step = rows.steps[segment.first]
        entry = plan.entry(segment.direction, step)
        time = timed.get(segment.first)
        if not axis.timed:
            yield _untimed(segment, step, entry, wait, axis)
        elif time is not None:  # a group of one rank has no collective
            offset_us, on_lane = time
            end = offset_us + on_lane.end_us
            exposed_us = 0.0 if wait is None else axis.begun[wait] - axis.reached[wait]
            slack_us = None if wait is None else max(axis.reached[wait] - end, 0.0)
            yield CollectiveBar(
                step, segment.direction, entry, segment.first, wait, on_lane.lane, 0,
                offset_us + on_lane.start_us, end, exposed_us, slack_us,
            )  # fmt: skip


def _untimed(
    segment: LaneSegment, step: Step, entry: SignatureEntry, wait: int | None, axis: Axis
) -> CollectiveBar:
    lane = list(Lane).index(segment.lane)
    start, end = axis.reached[segment.first], axis.done[segment.last]
    return CollectiveBar(
        step, segment.direction, entry, segment.first, wait, lane, segment.row, start, end
    )


def _timed(plan: Plan) -> Iterator[tuple[int, tuple[float, CollectiveTime]]]:
    """Number of the issuing step -> when its direction begins, and the collective's times."""
    first_step = 0
    pairs = zip(plan.schedules, plan.forecasts, offsets_us(plan.forecasts), strict=False)
    for schedule, forecast, offset_us in pairs:
        for time in forecast.collectives:
            yield first_step + time.issue, (offset_us, time)
        first_step += len(schedule.steps)
