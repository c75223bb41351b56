"""What a trace of torch.profiler says of a plan: `measured_of_trace(plan, trace)`.

The ranges of the runtime (`schedule.range_name`) are the places of the schedule in the trace. In
come both; out comes a `Measured` of the one rank that wrote the trace, medians over its steps. A
wait is exposed until the first op inside its range (the copy out), compute is what lies between
ranges. Where several regions lie between two ranges, they share that time as predicted. Ends of
collectives are not read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from graphshard.errors import MeasureError
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Direction, Plan, Schedule, Step, StepKind
from graphshard.schedule.steps import WAITS, direction_range_name, range_name
from graphshard.view.trace import OUR_RANGES, Event, events_of, is_time, read_any

# (work, waiting) of each step of a direction, in microseconds.
Times = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """One of our ranges. thread: process and thread, as text."""

    name: str
    thread: str
    ts: float
    dur: float

    @property
    def end_us(self) -> float:
        return self.ts + self.dur


@dataclass(frozen=True, slots=True)
class _Host:
    """The slices of the threads of the host: our ranges, and when ops start, by thread."""

    ranges: tuple[_Slice, ...]
    op_starts_us: Mapping[str, Sequence[float]]


def measured_of_trace(plan: Plan, trace: object) -> Measured:
    """Raises MeasureError: GS804 if `trace` has no complete step of `plan`, or is of a GPU."""
    host = _host(events_of(trace))
    runs = {s.direction: _runs(plan, s, host) for s in plan.schedules}
    count = min(map(len, runs.values()))
    if count == 0:
        raise MeasureError(
            "GS804",
            f"the trace has no complete step of {plan.name}: its ranges (graphshard::forward, "
            "graphshard::all_gather GROUP, ...) are not there in the plan's order",
        )
    laps = {direction: own[-count:] for direction, own in runs.items()}
    parts = {s.direction: _segments(s, laps[s.direction]) for s in plan.schedules}
    steps = list(zip(*laps.values(), strict=True))
    return Measured(
        num_steps=count,
        step_time_us=median(sum(a + b for own in step for a, b in own) for step in steps),
        exposed_us=median(sum(b for own in step for _, b in own) for step in steps),
        forward=parts[Direction.FORWARD],
        backward=parts.get(Direction.BACKWARD, ()),
    )


def measured_of_file(plan: Plan, path: Path) -> Measured:
    """From a plan file with `measured`, or a trace of torch.profiler.

    Raises FileError if it cannot be read or is a broken plan, MeasureError (GS801) for a plan that
    was not measured, (GS804) as `measured_of_trace`.
    """
    found = read_any(path)
    if not (isinstance(found, Mapping) and "schema" in found):
        return measured_of_trace(plan, found)
    measured = Plan.from_data(found).measured
    if measured is None:
        raise MeasureError("GS801", f"{path} is a plan that was not measured")
    return measured


def _host(events: Iterable[Event]) -> _Host:
    slices = [e for e in events if e.get("ph") == "X" and is_time(e.get("ts"))]
    if any(e.get("cat") == "kernel" for e in slices):
        text = "a trace of a GPU: its host does not wait; measure with graphshard.profile instead"
        raise MeasureError("GS804", text)
    slices.sort(key=lambda e: e["ts"])
    starts: dict[str, list[float]] = {}
    for event in slices:
        if event.get("cat") == "cpu_op":
            starts.setdefault(_thread(event), []).append(event["ts"])
    # A predicted process of ours in the same file has the same names, in other categories.
    ranges = [
        _Slice(str(e["name"]), _thread(e), e["ts"], e["dur"])
        for e in slices
        if e.get("cat") == "user_annotation"
        and str(e.get("name", "")).startswith(OUR_RANGES)
        and is_time(e.get("dur"))
    ]
    return _Host(tuple(ranges), starts)


def _thread(event: Event) -> str:
    return f"{event.get('pid')} {event.get('tid')}"


def _runs(plan: Plan, schedule: Schedule, host: _Host) -> list[Times]:
    """Each run of a direction in the trace that has the plan's ranges in the plan's order."""
    fqns = {group.id: group.fqn for group in plan.groups}
    kept = {(s.groups, s.params) for s in schedule.of_kind(StepKind.GATHER_ISSUE) if s.kept}
    names = [_name(step, fqns, kept) for step in schedule.steps]
    weights = _weights(plan, schedule)
    found = []
    for whole in host.ranges:
        if whole.name != direction_range_name(schedule.direction):
            continue
        inside = [e for e in host.ranges if _is_inside(e, whole)]
        if [e.name for e in inside] == [name for name in names if name]:
            found.append(_times(schedule, names, weights, whole, inside, host))
    return found


def _name(step: Step, fqns: Mapping[int, str], kept: Collection[tuple[object, ...]]) -> str:
    """Of the range that a step leaves in the trace; "" if it leaves none."""
    gathers = step.kind in (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT)
    if step.kind in (StepKind.COMPUTE, StepKind.RELEASE):
        return ""
    if gathers and (step.groups, step.params) in kept:
        return ""
    return range_name(step.kind, [fqns[group] for group in step.groups], step.params)


def _is_inside(event: _Slice, whole: _Slice) -> bool:
    if event is whole or event.thread != whole.thread:
        return False
    return whole.ts <= event.ts < whole.end_us


def _weights(plan: Plan, schedule: Schedule) -> list[float]:
    """Shares of the time between two ranges: as predicted; without a prediction, by ops."""
    forecasts = dict(zip((s.direction for s in plan.schedules), plan.forecasts, strict=False))
    if schedule.direction in forecasts:
        steps = zip(schedule.steps, forecasts[schedule.direction].steps, strict=True)
        return [time.work_us if step.kind is StepKind.COMPUTE else 0.0 for step, time in steps]
    return [float(step.stop - step.start) for step in schedule.steps]


def _times(
    schedule: Schedule,
    names: Sequence[str],
    weights: Sequence[float],
    whole: _Slice,
    inside: Sequence[_Slice],
    host: _Host,
) -> Times:
    times: Times = [(0.0, 0.0)] * len(schedule.steps)
    ranges = iter(inside)
    between: list[int] = []
    clock = whole.ts
    for index, (step, name) in enumerate(zip(schedule.steps, names, strict=True)):
        if not name:
            between.append(index)
            continue
        event = next(ranges)
        _share(times, between, weights, schedule, event.ts - clock)
        waiting_us = _waiting_us(event, host) if step.kind in WAITS else 0.0
        times[index] = (event.dur - waiting_us, waiting_us)
        clock = event.end_us
        between = [index]  # the host's time up to the next range, if no compute lies there
    _share(times, between, weights, schedule, whole.end_us - clock)
    return times


def _share(
    times: Times, places: Sequence[int], weights: Sequence[float], schedule: Schedule, us: float
) -> None:
    """`us` to the compute steps among `places`; where there are none, to the last of them."""
    compute = [i for i in places if schedule.steps[i].kind is StepKind.COMPUTE]
    total = sum(weights[i] for i in compute)
    for index in compute:
        share = weights[index] / total if total else 1 / len(compute)
        times[index] = (us * share, 0.0)
    if not compute and places:
        work_us, waiting_us = times[places[-1]]
        times[places[-1]] = (work_us + us, waiting_us)


def _waiting_us(event: _Slice, host: _Host) -> float:
    """Until the first op in the range of a wait."""
    starts = host.op_starts_us.get(event.thread, [])
    place = bisect_left(starts, event.ts)
    end = event.end_us
    return min(starts[place] if place < len(starts) else end, end) - event.ts


def _segments(schedule: Schedule, laps: Sequence[Times]) -> tuple[Segment, ...]:
    return tuple(
        Segment(step, median(us for us, _ in own), median(waiting for _, waiting in own))
        for step, own in zip(schedule.steps, zip(*laps, strict=True), strict=True)
    )
