"""What a run logs: the block of rank 0, TORCH_TRACE for tlparse, and the report of each rank."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from traces import checked

from graphshard.passes import CAPTURED, PLACEMENT
from graphshard.schedule.plan import Plan
from graphshard.view.log_text import collective_names

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
PASSES = [p.__name__ for p in (*CAPTURED, *PLACEMENT)]


@dataclass(frozen=True)
class Ran:
    """Where two ranks left their files, and what each wrote to stderr."""

    traces: Path
    reports: Path
    errors: tuple[str, ...]

    def plan(self, rank: int) -> Plan:
        (file,) = (self.reports / f"rank{rank}").glob("*.plan.json")
        return Plan.from_json(file.read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("logged")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    traces, reports = folder / "traces", folder / "reports"
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1]),
        "TORCH_TRACE": str(traces),
        "TORCH_LOGS": "graphshard",
        "GRAPHSHARD_CACHE_DIR": str(folder / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    argv = [sys.executable, str(HERE / "logged.py")]
    ranks = [
        subprocess.Popen(
            [*argv, str(rank), port, str(reports)],
            env={**environ, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = tuple(process.communicate(timeout=120)[1] for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], errors
    return Ran(traces, reports, errors)


def records(folder: Path, rank: int) -> list[tuple[dict[str, Any], str]]:
    """Each record of a rank's structured log, and its payload."""
    (file,) = folder.glob(f"*rank_{rank}_*.log")
    found: list[tuple[dict[str, Any], list[str]]] = []
    for line in file.read_text().splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            found.append((json.loads(line[line.index("{") :]), []))
    return [(record, "\n".join(lines)) for record, lines in found]


def named(folder: Path, rank: int, kind: str) -> dict[str, str]:
    return {
        record[kind]["name"]: payload
        for record, payload in records(folder, rank)
        if kind in record and "frame_id" in record
    }


def test_rank_0_logs_a_block_per_plan(ran: Ran) -> None:
    first, second = ran.errors
    assert "3 groups" in first
    assert "predicted: step" in first
    assert "of it optimizer" in first
    assert "predicted: forward and backward" in first
    assert "measured: forward and backward" in first
    assert "groups," not in second


def test_the_structured_log_has_graphs_plan_and_collectives(ran: Ran) -> None:
    for rank in range(2):
        graphs = named(ran.traces, rank, "graph_dump")
        own = {name for name in graphs if name.startswith("graphshard_after_")}
        after = {name.removeprefix("graphshard_after_") for name in own}
        after = {name.removesuffix("_forward").removesuffix("_backward") for name in after}
        assert after == {*PASSES, "regroup", "apply_plan"}
        assert all("def forward" in graphs[name] for name in own)
        artifacts = named(ran.traces, rank, "artifact")
        plan = Plan.from_json(artifacts["graphshard_plan"])
        schedule = json.loads(artifacts["inductor_collective_schedule"])
        assert schedule == list(collective_names(plan))
        assert len(schedule) == plan.summary().collectives > 0


def tlparsed(traces: Path, out: Path) -> str:
    """The index page that tlparse makes of `traces`; its files are in `out`."""
    tlparse = shutil.which("tlparse") or shutil.which("tlparse", path=Path(sys.executable).parent)
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    done = subprocess.run(
        [tlparse, "--all-ranks-html", "--no-browser", str(traces), "-o", str(out)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (out / "index.html").read_text()


def test_tlparse_shows_graphs_and_plan_and_finds_the_ranks_alike(ran: Ran, tmp_path: Path) -> None:
    index = tlparsed(ran.traces, tmp_path / "out")
    files = [str(f) for f in tmp_path.rglob("*")]
    assert any("graphshard_plan" in f for f in files), files
    assert any("graphshard_after_apply_plan_forward" in f for f in files)
    assert any("inductor_collective_schedule" in f for f in files)
    assert "Diverging collective" not in index


def test_tlparse_finds_ranks_with_other_collectives(ran: Ran, tmp_path: Path) -> None:
    shutil.copytree(ran.traces, tmp_path / "traces")
    (file,) = (tmp_path / "traces").glob("*rank_1_*.log")
    lines = file.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"inductor_collective_schedule"' in line)
    first = next(i for i in range(at, len(lines)) if "graphshard::all_gather" in lines[i])
    lines[first] = lines[first].replace("graphshard::all_gather", "graphshard::other", 1)
    file.write_text("".join(lines))
    assert "Diverging collective" in tlparsed(tmp_path / "traces", tmp_path / "out")


def test_the_report_has_plan_page_and_trace_of_each_rank(ran: Ran) -> None:
    for rank in range(2):
        folder = ran.reports / f"rank{rank}"
        plan = ran.plan(rank)
        assert plan.measured is not None
        assert {f.name.split(".", 1)[1] for f in folder.iterdir()} == {
            "plan.json", "html", "trace.json",
        }  # fmt: skip
        (page,), (trace,) = folder.glob("*.html"), folder.glob("*.trace.json")
        assert page.read_text().startswith("<!doctype html>")
        events = checked(json.loads(trace.read_text()))["traceEvents"]
        titles = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
        assert [t.split(" (")[0] for t in titles] == [
            "graphshard, predicted", "FSDP2, predicted", "graphshard, measured",
        ]  # fmt: skip
