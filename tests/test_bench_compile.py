"""bench/compile_time.py: its arithmetic with made-up numbers, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from smoke import smoke  # noqa: E402

from bench import compile_table, compile_time, emulator  # noqa: E402
from bench.compile_launch import Measured, Step  # noqa: E402
from bench.compile_table import Launch, Pair  # noqa: E402
from bench.ways import choose  # noqa: E402

TIMERS = {
    "_compile.compile_inner": 6.0,
    "build_guards": 0.5,
    "create_aot_dispatcher_function": 4.0,
    "backward._backward_impl": 2.0,
    "aot_trace_joint_graph": 1.0,
    "aot_collect_metadata": 0.25,
    "compile_fx_inner": 4.0,
}
WAYS = choose("fsdp2_blocks,simple_fsdp,graphshard_aten")


def launch(first_s, misses=2, runs=10, limit_s=100.0):
    if first_s > limit_s:
        return Launch(None, limit_s, 0, limit_s)
    steps = [Step(64, first_s, 1, misses, 0), Step(48, 3.0, 1, misses, 0), Step(40, 0.1, 0, 0, 0)]
    return Launch(Measured(steps, TIMERS, 0), first_s + 2, runs, limit_s)


def pair(first_s, misses=0, runs=0):
    return Pair(launch(first_s), launch(first_s / 4, misses, runs))


def one_round(**seconds):
    return {way: {4: pair(few), 64: pair(many)} for way, (few, many) in seconds.items()}


ROUNDS = [
    one_round(fsdp2_blocks=(20, 22), simple_fsdp=(30, 90), graphshard_aten=(10, 25)),
    one_round(fsdp2_blocks=(20, 22), simple_fsdp=(30, 96), graphshard_aten=(12, 48)),
]


def test_the_parts_of_a_first_step_add_up_to_it():
    parts = compile_table.phases_s(launch(9.0).measured)
    assert parts == {
        "Dynamo": 1.5, "guards": 0.5, "joint trace": 1.25, "after trace": 0.75, "Inductor": 4.0,
        "other": 1.0,
    }  # fmt: skip
    assert sum(parts.values()) == 9.0


def test_targets_are_judged_on_paired_cold_launches():
    found = {(c.ours, c.peer): c for c in compile_table.comparisons(WAYS, ROUNDS)}
    grown = found["graphshard_aten, 64 blocks", "4 blocks"]
    assert (grown.ratio.low, grown.ratio.median, grown.ratio.high) == (2.5, 3.25, 4.0)
    assert not grown.met
    assert found["fsdp2_blocks, 64 blocks", "4 blocks"].met
    block = found["graphshard_aten, a block beyond 4", "1 s"]
    assert (block.ratio.low, block.ratio.high) == (0.25, 0.6)
    assert block.met  # by its near end
    peer = found["graphshard_aten, 64 blocks", "simple_fsdp"]
    assert (peer.ratio.low, peer.ratio.high) == (25 / 90, 0.5)
    assert peer.met


def test_a_launch_that_took_too_long_counts_as_its_limit():
    late = one_round(simple_fsdp=(30, 1000), graphshard_aten=(10, 25))
    row = compile_table.make_row(WAYS[1], 64, [late["simple_fsdp"][64]])
    assert (row.first_s, row.late, row.phases_s) == (100.0, 1, {})
    peer = compile_table.comparisons(WAYS, [late])[-1]
    assert (peer.peer, peer.ratio.median) == ("simple_fsdp", 0.25)
    text = compile_table.render(WAYS, [late])
    assert "> 100.00" in text
    assert "SimpleFSDP, Inductor, 64 blocks: 1 launches took too long" in text


def test_fewer_launches_of_one_way_are_paired_where_they_are():
    fewer = [ROUNDS[0], {"graphshard_aten": ROUNDS[1]["graphshard_aten"]}]
    found = {(c.ours, c.peer): c for c in compile_table.comparisons(WAYS, fewer)}
    assert found["graphshard_aten, 64 blocks", "simple_fsdp"].ratio.high == 25 / 90
    assert found["graphshard_aten, 64 blocks", "4 blocks"].ratio.high == 4.0
    assert compile_time.counts("simple_fsdp=2,fsdp2_blocks=3") == {
        "simple_fsdp": 2, "fsdp2_blocks": 3,
    }  # fmt: skip


def test_a_second_launch_that_compiles_is_said():
    way = WAYS[2]
    for misses, runs, said in ((0, 0, "met"), (1, 0, "MISSED"), (0, 3, "MISSED")):
        row = compile_table.make_row(way, 4, [pair(1.0), pair(1.0, misses, runs)])
        assert compile_table.nothing_anew(row).endswith(said)
    assert (row.compiler_runs, row.warm_compiler_runs, row.length_graphs) == (10, 3, (1, 0))


@pytest.mark.slow
def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    code = "from bench import emulator; emulator.load_extension()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # compilers warn
    assert emulator.load_extension()
    out = tmp_path / "compile.json"
    ways = ("--modes", "fsdp2,graphshard_aten")
    smoke(monkeypatch, compile_time, "--smoke", *ways, "--json", str(out))
    assert "graphshard_aten, 2 blocks / 1 blocks" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert {"command", "machine", "versions", "rows", "targets", "launches"} <= set(result)
    ours = [row for row in result["rows"] if row["way"] == "graphshard_aten"]
    assert [row["num_blocks"] for row in ours] == [1, 2]
    assert all(row["graphs"] == 1 and row["compiler_runs"] == 0 for row in ours)
    for row in ours:
        assert sum(row["phases_s"].values()) == pytest.approx(row["first_s"])


@pytest.mark.slow
def test_a_launch_past_its_limit_is_reported():
    args = ["bench/compile_time.py", "--smoke", "--modes", "fsdp2", "--limit-s", "0.2"]
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "> 0.20" in done.stdout
