"""The trace of a plan: its lanes, collectives, exposed waits, counters and arrows."""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from forecasts import as_predicted, planned
from planning import layers, random_problem
from plans import two_layers
from traces import arrows, checked

from graphshard.cli import main
from graphshard.errors import MeasureError
from graphshard.schedule.plan import StepKind
from graphshard.view.scenario import scenarios
from graphshard.view.trace import merged, read_trace, trace

PROCESSES = ["graphshard, predicted", "FSDP2, predicted", "graphshard, measured"]


@pytest.fixture(params=["two lanes", "one lane", "budget"])
def plan(request):
    settings = {
        "two lanes": {"gather_us": 150.0, "root": True},
        "one lane": {"gather_us": 150.0, "shared_lane": True},
        "budget": {"gather_us": 150.0, "budget_bytes": 1 << 40, "activations": 100},
    }
    found = planned(layers(6, **settings[request.param]))
    return replace(found, measured=as_predicted(found, compute=1.25))


def slices(events, category):
    return [e for e in events if e["ph"] == "X" and e["cat"] == category]


def processes(found):
    """The events of each process, by its title, in the order of the file."""
    pids = {
        e["pid"]: e["args"]["name"].split(" (")[0]
        for e in found["traceEvents"]
        if e.get("name") == "process_name"
    }
    return {
        title: [e for e in found["traceEvents"] if e["pid"] == pid] for pid, title in pids.items()
    }


def test_each_scenario_is_a_process(plan):
    found = processes(checked(trace(plan)))
    assert list(found) == PROCESSES
    for events, scenario in zip(found.values(), scenarios(plan), strict=True):
        threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        assert threads[0] == "compute"
        assert len(threads) == 1 + len({c.lane for c in scenario.collectives})
        ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
        assert math.isclose(max(ends), scenario.us)


def test_each_collective_is_one_slice(plan):
    theirs = replace(plan, forward=plan.fsdp2.schedules[0], backward=plan.fsdp2.schedules[1])
    expected = dict(zip(PROCESSES, (plan, theirs, plan), strict=True))
    for title, events in processes(trace(plan)).items():
        told = [(e["args"]["direction"], e["name"].split("::")[1].split(" ")[0],
                 " + ".join(e["args"]["groups"]), e["args"]["dtype"], e["args"]["bytes"])
                for e in slices(events, "collective")]  # fmt: skip
        collective_signature = [
            (e.direction, e.kind, e.group, e.dtype, e.size_bytes)
            for e in expected[title].collective_signature
        ]
        assert Counter(told) == Counter(collective_signature)


def test_exposed_slices_add_up_to_the_reported_time(plan):
    reported = {
        PROCESSES[0]: plan.estimate.exposed_us,
        PROCESSES[1]: plan.estimate.fsdp2.exposed_us,
        PROCESSES[2]: plan.measured.exposed_us,
    }
    assert reported[PROCESSES[1]] > 0
    for title, events in processes(trace(plan)).items():
        assert math.isclose(sum(e["dur"] for e in slices(events, "exposed")), reported[title])


def test_arrows_lead_from_each_collective_to_its_wait(plan):
    for title, events in processes(trace(plan)).items():
        found = arrows(events)
        waits = [s for s in plan.schedules for s in s.of_kind(StepKind.GATHER_WAIT)]
        assert len(found) == len(slices(events, "collective")) >= len(waits) > 0, title
        for start, stop in found:
            assert start["cat"] == "collective"
            assert stop is None or stop["tid"] == 0
            assert stop is not None or start["name"].startswith("graphshard::reduce_scatter")


def test_counters_are_the_plans_memory(plan):
    peak = plan.estimate.peak_bytes
    for title, events in processes(trace(plan)).items():
        counters = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
        if title == PROCESSES[0]:
            assert max(counters) == peak
        assert (counters == []) == (title == PROCESSES[2])


def test_a_merged_trace_has_both(plan):
    other = {
        "schemaVersion": 1,
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4711, "tid": 4711,
             "ts": 1000.5, "dur": 2.0, "args": {}},
            {"ph": "X", "cat": "user_annotation", "name": "graphshard::all_gather layers.0",
             "pid": 4711, "tid": 4711, "ts": 2000.5, "dur": 2.0, "args": {}},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 4711, "tid": 4711, "ts": 1},
            {"ph": "X", "cat": "Trace", "name": "PyTorch", "pid": "Spans", "tid": "PyTorch",
             "ts": 0.0, "dur": 1.0, "args": {}},
        ],
    }  # fmt: skip
    found = checked(merged(plan, other))
    assert found["schemaVersion"] == 1
    assert found["traceEvents"][:4] == other["traceEvents"]
    added = found["traceEvents"][4:]
    assert sorted({e["pid"] for e in added}) == [4712, 4713, 4714]
    assert min(e["id"] for e in added if "id" in e) == 8
    assert min(e["ts"] for e in added if "ts" in e) == 2000.5


def test_a_plan_without_times_has_no_trace():
    with pytest.raises(MeasureError, match="GS803: toy was made without the cost model"):
        trace(two_layers())


def test_view_writes_a_trace(plan, tmp_path, capsys):
    file, out, other = (tmp_path / name for name in ("toy.plan.json", "toy.json", "other.json.gz"))
    file.write_text(plan.to_json())
    assert main(["view", str(file), "--perfetto", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert checked(read_trace(out)) == json.loads(json.dumps(trace(plan)))
    other.write_bytes(gzip.compress(b'[{"ph": "X", "name": "a", "cat": "b", "pid": 3, "tid": 3,'
                                    b' "ts": 5, "dur": 1}]'))  # fmt: skip
    page = tmp_path / "page.html"
    argv = ["view", file, "--perfetto", out, "--merge", other, "-o", page, "--json"]
    assert main([str(a) for a in argv]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(page), "perfetto": str(out)}
    assert page.exists()
    assert read_trace(out)["traceEvents"][0]["pid"] == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{}", "GS804"), (b"no", "GS804"), (b"\x1f\x8bno", "GS804"), (None, "GS1203: cannot read")],
)
def test_what_is_no_trace_is_said_so(plan, tmp_path, capsys, content, says):
    file, out, other = (tmp_path / name for name in ("toy.plan.json", "toy.json", "other.json"))
    file.write_text(plan.to_json())
    if content is not None:
        other.write_bytes(content)
    assert main(["view", str(file), "--perfetto", str(out), "--merge", str(other)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert says in found.err
    assert not out.exists()


def test_a_trace_never_replaces_what_it_was_made_of(plan, tmp_path, capsys):
    file = tmp_path / "toy.plan.json"
    file.write_text(plan.to_json())
    assert main(["view", str(file), "--perfetto", str(file)]) == 2
    assert main(["view", str(file), "--merge", str(file)]) == 2
    assert "--merge TRACE needs --perfetto OUT" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(25))
def test_traces_of_random_plans_are_sound(seed):
    plan = planned(random_problem(seed, options=False, regroup=False, micro=False))
    found = processes(checked(trace(plan)))
    for events, figures in zip(found.values(), (plan.estimate.ours, plan.estimate.fsdp2),
                               strict=True):  # fmt: skip
        exposed_us = math.fsum(e["dur"] for e in slices(events, "exposed"))
        assert math.isclose(exposed_us, figures.exposed_us, abs_tol=1e-6)
        counters = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
        assert max(counters, default=0) == figures.peak_bytes
        arrows(events)
