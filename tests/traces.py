"""Traces: one as torch.profiler writes it, and reading one as a viewer of the Trace Event Format
does."""

from collections import defaultdict

import jsonschema

from graphshard.schedule.plan import StepKind
from graphshard.schedule.steps import direction_range_name, range_name

NUMBER, ID = {"type": "number"}, {"type": ["integer", "string"]}
# Of the document "Trace Event Format": what a viewer needs of each phase that we write.
PHASES = {
    "X": {"required": ["name", "cat", "pid", "tid", "ts", "dur"]},
    "M": {"required": ["name", "pid", "args"]},
    "C": {
        "required": ["name", "pid", "ts", "args"],
        "properties": {"args": {"additionalProperties": NUMBER}},
    },
    "s": {"required": ["name", "cat", "id", "pid", "tid", "ts"]},
    "f": {"required": ["name", "cat", "id", "pid", "tid", "ts", "bp"]},
}
EVENT = {
    "type": "object",
    "required": ["ph"],
    "properties": {
        "ph": {"type": "string", "minLength": 1},
        "name": {"type": "string"},
        "cat": {"type": "string"},
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
        "pid": ID,
        "tid": ID,
        "id": ID,
        "bp": {"enum": ["e"]},
        "args": {"type": "object"},
    },
}
FILE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": {"type": "object"}}},
}


def validator(*schemas):
    return jsonschema.Draft202012Validator({"allOf": schemas})


# One for each phase: a schema that looks for the phase itself takes twice as long.
OF_FILE, OF_OTHERS = validator(FILE), validator(EVENT)
OF_EVENTS = {phase: validator(EVENT, rule) for phase, rule in PHASES.items()}


def checked(trace):
    """`trace`, which every viewer can read: the schema, slices that nest, arrows with two ends."""
    OF_FILE.validate(trace)
    events = trace["traceEvents"]
    for event in events:
        OF_EVENTS.get(event.get("ph"), OF_OTHERS).validate(event)
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        open_ = []
        for found in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and end(open_[-1]) <= found["ts"] + 1e-3:
                open_.pop()
            assert not open_ or end(found) <= end(open_[-1]) + 1e-3, (open_[-1], found)
            open_.append(found)
    return trace


def end(event):
    return event["ts"] + event["dur"]


def arrows(events):
    """(slice that it starts in, slice that it ends in) of each of our flows."""
    ends = defaultdict(dict)
    for event in events:
        if event.get("cat") == "graphshard":
            ends[event["id"]][event["ph"]] = event
    assert all(set(pair) == {"s", "f"} for pair in ends.values())
    return [(around(events, pair["s"]), around(events, pair["f"])) for pair in ends.values()]


def around(events, event):
    """The innermost slice at an event's time; one that begins there wins over one that ends."""
    where = (event["pid"], event["tid"])
    own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == where]
    inside = [e for e in own if e["ts"] <= event["ts"] <= end(e)]
    return max(inside, key=lambda e: (e["ts"], -e["dur"]), default=None)


def trace_of(plan):
    """What torch.profiler writes of two steps, as far as it is read."""
    fqns = {g.id: g.fqn for g in plan.groups}
    events, clock = [], 10.0

    def add(name, start, dur, cat="user_annotation"):
        where = {"pid": 7, "tid": 3, "ts": start, "dur": dur}
        events.append({"ph": "X", "cat": cat, "name": name, "args": {"n": 1}, **where})

    for schedule in plan.schedules * 2:
        begin = clock
        for step in schedule.steps:
            clock += 5.0
            if step.kind not in (StepKind.COMPUTE, StepKind.RELEASE) and not step.kept:
                add(range_name(step.kind, [fqns[n] for n in step.groups], step.params), clock, 3.0)
                add("aten::copy_", clock + 1.0, 1.0, "cpu_op")
        clock += 5.0
        add(direction_range_name(schedule.direction), begin, clock - begin)
        clock += 5.0
    return {"schemaVersion": 1, "traceEvents": events}
