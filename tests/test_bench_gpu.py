"""bench/gpu.py: its arithmetic with made-up numbers, and that all ways run on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from smoke import smoke  # noqa: E402

from bench import gpu, gpu_memory  # noqa: E402
from bench.gpu_launch import Expected, Measured, Request  # noqa: E402
from bench.gpu_network import EmulatedGroup  # noqa: E402
from bench.ways import choose, exists  # noqa: E402
from graphshard.cost.comm import CollectiveKind  # noqa: E402

WAYS = choose("inductor,fsdp2_blocks,graphshard_aten")


def one_round(*steps_us):
    return {
        way.name: Measured(
            [us, 2 * us, 9 * us], [us / 4] * 3, [2.0, 1.0], 5.0, 2**30, 10, "a gpu", [us] * 3,
            Expected(1e3 * us, 2**31),
        )
        for way, us in zip(WAYS, steps_us, strict=True)
    }  # fmt: skip


ROUNDS = [one_round(100.0, 120.0, 102.0), one_round(200.0, 260.0, 208.0)]


def test_tokens_a_second_are_those_of_the_median_step():
    row = gpu.make_row(WAYS[0], ROUNDS, tokens=600)
    assert (row.step_us, row.tokens_per_s) == (300.0, 2e6)
    assert (row.host_us, row.peak_bytes, row.loss) == (37.5, 2**30, 1.0)
    text = gpu.render([row], gpu.comparisons(WAYS, ROUNDS), 2)
    assert "2,000,000" in text
    assert "200.00 ms, 2.0 GiB" in text  # expected, in the newest launch
    assert "graphshard_aten / inductor: 1.03 [1.02, 1.04], target 1.03: met" in text


def test_step_times_are_compared_within_a_round():
    blocks, ours = gpu.comparisons(WAYS, ROUNDS)
    assert (blocks.ours, blocks.met, ours.met) == ("fsdp2_blocks", False, True)
    assert (ours.ratio.low, ours.ratio.high) == pytest.approx((1.02, 1.04))
    (many,) = gpu.comparisons(WAYS[1:], ROUNDS, gpu.MANY)
    assert (many.ours, many.peer, many.met) == ("graphshard_aten", "fsdp2_blocks", True)
    assert gpu.comparisons(WAYS[1:], [{"fsdp2_blocks": ROUNDS[0]["fsdp2_blocks"]}]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # C++ compilers, which are slow on a busy machine
def test_all_ways_run_on_a_cpu(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    smoke(monkeypatch, gpu, "--smoke", "--json", str(out))
    result = json.loads(out.read_text())
    known = [way.name for way in choose(gpu.MODES) if exists(way)]
    assert [row["way"] for row in result["rows"]] == [w for w in known if w not in gpu.CUDA_ONLY]
    told = [row["expected"] and row["expected"]["grads_us"] > 0 for row in result["rows"]]
    assert told == [None, None, True, True]
    first = [launches["losses"][0] for launches in result["launches"][0].values()]
    assert first == pytest.approx([first[0]] * len(first), rel=0.02)  # bf16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_emulated_ranks_run_on_a_cpu(tmp_path, monkeypatch):
    """Numbers of time say nothing here; the losses of both ways have to be the same."""
    out = tmp_path / "gpu8.json"
    command = ("--ranks", "8", "--modes", "fsdp2,graphshard_aten", "--json", str(out))
    smoke(monkeypatch, gpu, "--smoke", *command)
    result = json.loads(out.read_text())
    assert (result["ranks"], result["network"]) == (8, "h100")
    theirs, ours = (launch["losses"] for launch in result["launches"][0].values())
    assert ours == pytest.approx(theirs, rel=0.02)


def test_what_a_collective_writes_and_how_long_it_takes():
    asked = []
    group = EmulatedGroup(4, torch.device("cpu"), lambda *of: asked.append(of) or 1.0)
    output, own = torch.zeros(8), torch.tensor([1.0, 2.0])
    group.all_gather_single(output, own).wait()
    assert output.tolist() == [1.0, 2.0] * 4
    mine = torch.zeros(2)
    group._reduce_scatter_base(mine, torch.arange(8.0)).wait()
    assert mine.tolist() == [0.0, 1.0]
    assert asked == [(CollectiveKind.ALL_GATHER, 32), (CollectiveKind.REDUCE_SCATTER, 32)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_budgets_are_swept_on_a_cpu(tmp_path, monkeypatch):
    """Numbers of time and memory say nothing here; the losses of all launches have to be alike."""
    out = tmp_path / "memory.json"
    smoke(monkeypatch, gpu_memory, "--smoke", "--json", str(out))
    result = json.loads(out.read_text())
    assert [launch["spot"] for launch in result["launches"]] == [
        gpu_memory.FULL, gpu_memory.NONE, "budget 1.0 MB, host", "budget 1073.7 MB, host",
        "budget 1.0 MB", "budget 1073.7 MB",
    ]  # fmt: skip
    first = [launch["losses"][0] for launch in result["launches"]]
    assert first == pytest.approx([first[0]] * len(first), rel=0.02)  # bf16
    for spot in result["spots"][2:]:
        assert 0 < spot["predicted_peak_bytes"] <= spot["budget_bytes"]


def test_a_budget_that_does_not_fit_is_launched_once(tmp_path, monkeypatch):
    asked = []

    def launch(request, cache):
        asked.append(request)
        if request.options.get("memory_budget") == 1:
            raise RuntimeError("GS601: a budget of 1 byte")
        return ROUNDS[0]["graphshard_aten"]

    monkeypatch.setattr(gpu_memory, "launch", launch)
    request = Request("", "tiny", "cpu", 1, 1)
    sweep = gpu_memory.Sweep(request, {}, tmp_path / "memory.json", "")
    for spot in [*gpu_memory.budgets(1, 2**31, 2, offload=True)] * 2:
        sweep.launch(spot)
    assert [(r.way, r.options["offload"]) for r in asked] == [("graphshard", "auto")] * 3
    small, large = sweep.spots
    assert (small.failed, large.predicted_peak_bytes, large.step_us) == ("does not fit", 2**31, 102)
    assert len(json.loads((tmp_path / "memory.json").read_text())["launches"]) == 2
