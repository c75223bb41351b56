"""A plan as a trace for Perfetto, next to what torch.profiler recorded or alone.

In comes a `Plan`; out come events of Chromium's Trace Event Format, which torch.profiler exports
too (`ph`: the kind; `ts`, `dur`: microseconds). Each scenario is a process: a thread for compute,
one for each in-order queue of collectives, counters of memory. Every collective is one slice;
slices of category "exposed" add up to the exposed time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from graphshard.errors import FileError, MeasureError
from graphshard.files.decode import MOST
from graphshard.files.reading import read_packed_json
from graphshard.schedule.plan import Lane, Plan, StepKind
from graphshard.view.scenario import Carried, ComputeSpan, Scenario, scenarios
from graphshard.view.text import lane_names, ranks_of

Event: TypeAlias = dict[str, Any]

COMPUTE_TID = 0
OUR_RANGES = "graphshard::"


@dataclass(frozen=True, slots=True)
class TraceOffset:
    """Where events go in a file: the first free process id and flow id, and the time of zero."""

    pid: int = 1
    flow: int = 1
    zero_us: float = 0.0


def trace(plan: Plan) -> dict[str, Any]:
    """A whole trace file. Raises MeasureError (GS803) if the plan knows no times."""
    return {"displayTimeUnit": "ms", "traceEvents": list(trace_events(plan))}


def merged(plan: Plan, other: Mapping[str, Any]) -> dict[str, Any]:
    """`other`, a trace of torch.profiler, with the events of `plan` added.

    They get process ids and flow ids that `other` does not use, and begin where graphshard's first
    range in `other` begins. Raises MeasureError (GS803) as `trace`, (GS804) if `other` is no trace.
    """
    events = events_of(other)
    return {**other, "traceEvents": [*events, *trace_events(plan, _free_place(events))]}


def trace_text(plan: Plan, merge: Path | None = None) -> str:
    """The trace file of `plan`, alone or merged into a copy of the trace `merge`.

    Raises MeasureError (GS803, GS804), and FileError if `merge` cannot be read.
    """
    found = trace(plan) if merge is None else merged(plan, read_trace(merge))
    try:
        return json.dumps(found)
    except RecursionError:
        raise MeasureError("GS804", f"{merge} is no trace: it is nested too deeply") from None


def read_trace(path: Path) -> dict[str, Any]:
    """A trace file, gzipped or not. Raises FileError, or MeasureError (GS804) if it is no trace."""
    found = read_any(path)
    events = events_of(found)
    return found if isinstance(found, dict) else {"traceEvents": events}


def read_any(path: Path) -> object:
    """What a trace file holds, or any other JSON. Raises FileError, MeasureError (GS804)."""
    try:
        return read_packed_json(path)
    except FileError as error:
        if error.code == "GS1204":
            raise MeasureError("GS804", f"no trace: {error.message}") from error
        raise


def events_of(found: object) -> list[Event]:
    """The events of a trace file, in either form of the format. Raises MeasureError (GS804)."""
    events = found.get("traceEvents") if isinstance(found, Mapping) else found
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise MeasureError("GS804", "no trace: it has no list of traceEvents")
    return events


def is_time(value: object) -> bool:
    """A number of microseconds: what others wrote may hold anything in its place."""
    return isinstance(value, int | float) and -MOST < value < MOST


def trace_events(plan: Plan, place: TraceOffset | None = None) -> Iterator[Event]:
    """The events of all scenarios of `plan`. Raises MeasureError (GS803) if it has none."""
    place = place or TraceOffset()
    found = scenarios(plan)
    if not found:
        text = f"{plan.name} was made without the cost model and never measured: it has no times"
        raise MeasureError("GS803", text)
    flow = place.flow
    for number, scenario in enumerate(found):
        at = TraceOffset(place.pid + number, flow, place.zero_us)
        flow += len(scenario.collectives)
        yield from _names(scenario, at, number, plan.name)
        for work in scenario.works:
            yield from _work(work, at)
        for index, carried in enumerate(scenario.collectives):
            yield from _collective(plan, scenario, carried, at, at.flow + index)
        yield from _memory(scenario, at)


def _free_place(events: Iterable[Event]) -> TraceOffset:
    events = list(events)
    pids = [e["pid"] for e in events if isinstance(e.get("pid"), int)]
    flows = [e["id"] for e in events if isinstance(e.get("id"), int)]
    timed = [e for e in events if is_time(e.get("ts"))]
    starts = [e["ts"] for e in timed]
    own = [e["ts"] for e in timed if str(e.get("name", "")).startswith(OUR_RANGES)]
    return TraceOffset(
        pid=max(pids, default=0) + 1,
        flow=max(flows, default=0) + 1,
        zero_us=min(own or starts, default=0.0),
    )


def _names(scenario: Scenario, at: TraceOffset, number: int, plan_name: str) -> Iterator[Event]:
    """What processes and threads are called, and the order in which they stand."""
    about = {"name": f"{scenario.title} ({plan_name})"}
    yield {"ph": "M", "name": "process_name", "pid": at.pid, "tid": COMPUTE_TID, "args": about}
    order = {"sort_index": -100 + number}  # above the host's threads
    yield {"ph": "M", "name": "process_sort_index", "pid": at.pid, "tid": 0, "args": order}
    threads = {COMPUTE_TID: "compute"}
    lanes = lane_names((c.lane, Lane(c.entry.kind)) for c in scenario.collectives)
    threads |= {_tid(lane): name for lane, name in lanes.items()}
    for tid, name in threads.items():
        called, order = {"name": name}, {"sort_index": tid}
        yield {"ph": "M", "name": "thread_name", "pid": at.pid, "tid": tid, "args": called}
        yield {"ph": "M", "name": "thread_sort_index", "pid": at.pid, "tid": tid, "args": order}


def _tid(lane: int) -> int:
    return lane + 1


def _slice(
    name: str, category: str, at: TraceOffset, tid: int, start_us: float, us: float
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": at.pid,
        "tid": tid,
        "ts": at.zero_us + start_us,
        "dur": us,
        "args": {},
    }


def _work(work: ComputeSpan, at: TraceOffset) -> Iterator[Event]:
    """A step on the compute lane; its exposed wait is a slice inside it."""
    if work.exposed_us + work.us == 0:
        return
    is_compute = work.step.kind is StepKind.COMPUTE
    category = "compute" if is_compute else "communication step"
    whole_us = work.exposed_us + work.us
    found = _slice(work.where, category, at, COMPUTE_TID, work.start_us, whole_us)
    found["args"] = {"direction": str(work.direction)}
    if is_compute:
        found["args"]["ops"] = work.step.stop - work.step.start
    yield found
    if work.exposed_us > 0:
        name = f"exposed: {work.where}"
        yield _slice(name, "exposed", at, COMPUTE_TID, work.start_us, work.exposed_us)


def _collective(
    plan: Plan, scenario: Scenario, carried: Carried, at: TraceOffset, flow: int
) -> Iterator[Event]:
    """One slice on its lane, and an arrow to the step that waits for it."""
    us = carried.end_us - carried.start_us
    found = _slice(carried.name, "collective", at, _tid(carried.lane), carried.start_us, us)
    issue = scenario.works[carried.issue].step
    group = next(group for group in plan.groups if group.id == issue.groups[0])
    ranks = ranks_of(issue, group)
    found["args"] = {
        "groups": [group.fqn for n in issue.groups for group in plan.groups if group.id == n],
        "bytes": carried.entry.size_bytes,
        "dtype": carried.entry.dtype,
        "direction": carried.entry.direction,
        "ranks": ranks,
    }
    yield found
    if carried.wait is None:
        return
    wait = scenario.works[carried.wait]
    # An arrow ends in the slice that is there at its time: the wait, or what follows at once.
    end_us = max(carried.start_us, wait.start_us + wait.exposed_us)
    both = {"name": "gathered" if issue.kind is StepKind.GATHER_ISSUE else "reduced"}
    both |= {"cat": "graphshard", "id": flow, "pid": at.pid}  # type: ignore[dict-item]
    start = {"tid": _tid(carried.lane), "ts": at.zero_us + carried.start_us}
    yield {"ph": "s", **both, **start}
    yield {"ph": "f", "bp": "e", **both, "tid": COMPUTE_TID, "ts": at.zero_us + end_us}


def _memory(scenario: Scenario, at: TraceOffset) -> Iterator[Event]:
    """A counter wherever it changes; the last step's value holds until its end."""
    last: tuple[object, ...] = ()
    for work in scenario.works:
        if work.memory and work.memory != last:
            values = {str(category): size for category, size in work.memory}
            ts = at.zero_us + work.start_us
            yield {"ph": "C", "name": "memory", "pid": at.pid, "ts": ts, "args": values}
        last = work.memory
