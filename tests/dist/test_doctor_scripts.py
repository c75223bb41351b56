"""The doctor examines whole scripts: each fault of doctor_scripts/train.py, what AOTAutograd does
to doctor_scripts/dropout.py, and the example.

What needs no second rank runs on one, and faults that do not hide each other share a script.
"""

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from graphshard.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "doctor_scripts/train.py"
DROPOUT = Path(__file__).parent / "doctor_scripts/dropout.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Examines `python COMMAND`: the exit status, the verdict with the modes in which the command
    ran and whose a difference is, and the findings by code."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GRAPHSHARD_CACHE_DIR", str(tmp_path / "cache"))

    def run(*command):
        status = main(["doctor", "--json", "--", sys.executable, *map(str, command)])
        out, err = capsys.readouterr()
        told = json.loads(out)
        print(out, err)  # shown where a test fails
        if told["verdict"] is not None:
            modes = re.findall(r"running with (\w+)", err)
            told["verdict"] |= {"modes": modes, "origin": told["origin"]}
        return status, told["verdict"], {found["code"]: found for found in told["findings"]}

    return run


@pytest.fixture
def one_rank(doctor, monkeypatch):
    """Examines the script with faults, or another one, as the only rank of its world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return lambda *faults, script=SCRIPT: doctor(script, *faults)


def test_optimizer_and_compile_before_sharding_one_group_and_torch_save(one_rank, monkeypatch):
    """The numbers are equal to the last bit, so that there is no third run."""
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    status, verdict, found = one_rank("optimizer-first", "compile-first", "root-only", "torch-save")
    assert status == 1
    assert set(found) == {"GS1124", "GS1125", "GS1128"}
    assert "AdamW holds 14 of 14 parameters" in found["GS1125"]["what"]
    assert "98% of 3,284 parameters are in the group of (root)" in found["GS1124"]["what"]
    assert "3 Block in layers" in found["GS1124"]["what"]
    assert "for block in model.layers: fully_shard(block)" in found["GS1124"]["fix"]
    assert "14 sharded tensors to " in found["GS1128"]["what"]
    assert (verdict["groups"], verdict["in_graph"]) == (1, 1)
    assert (verdict["modes"], verdict["origin"]) == (["eager", "graphshard"], None)
    assert (verdict["loss_difference"], verdict["gradient_difference"]) == (0, 0)


def test_what_aotautograd_does_to_dropout(one_rank, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    status, verdict, found = one_rank(script=DROPOUT)
    assert (status, found, verdict["in_graph"]) == (0, {}, 3)
    assert verdict["modes"] == ["eager", "graphshard", "aot_eager"]
    assert verdict["origin"] == {
        "cause": "aotautograd",
        "step": 0,
        "in_loss": False,
        "groups": ["(root)", "layers.0", "layers.1"],
        "is_same": True,
        "doubt": None,
    }
    assert 0 < verdict["gradient_difference"] <= verdict["tolerance"]


def test_forward_called_directly_and_a_group_for_each_linear(one_rank):
    status, _, found = one_rank("forward", "linears")
    assert status == 1
    assert set(found) == {"GS1122", "GS1127", "GS1129"}
    assert "forward() of (root) was called directly" in found["GS1122"]["what"]
    assert "6 of 7 groups are a single Linear" in found["GS1127"]["what"]
    assert "ran through eager FSDP2" in found["GS1129"]["what"]


def test_sharding_from_the_top(one_rank):
    status, verdict, found = one_rank("top-down")
    assert (status, verdict) == (1, None)
    assert set(found) == {"GS1110", "GS1123"}
    assert "(root) was sharded before layers.0" in found["GS1123"]["what"]


def test_seeds_by_chance(one_rank):
    """The script never compiles: the doctor does."""
    status, verdict, found = one_rank("by-chance", "no-compile")
    assert status == 0
    assert set(found) == {"GS1113"}
    assert (verdict["groups"], verdict["in_graph"]) == (4, 4)


def test_a_dropped_reduction_and_a_block_that_is_not_captured(doctor, monkeypatch):
    """Unseeded too: the doctor seeds. A graph break leaves the first step to eager FSDP2."""
    monkeypatch.setenv("GRAPHSHARD_COMPUTE", "aten")
    faults = ("dropped-reduction", "never-captured", "no-seed")
    status, verdict, found = doctor(*TORCHRUN, SCRIPT, *faults)
    assert status == 1
    assert set(found) == {"GS1111", "GS1129", "GS1130"}
    assert "the gradients of layers.2 differ by" in found["GS1111"]["what"]
    assert "in step 1 (allowed 0.001); those of 3 other groups agree" in found["GS1111"]["what"]
    assert "layers.1 ran through eager FSDP2" in found["GS1129"]["what"]
    assert verdict["modes"] == ["eager", "graphshard", "aot_eager"]
    assert (verdict["origin"]["cause"], verdict["origin"]["step"]) == ("other", 1)
    assert verdict["origin"]["groups"] == ["layers.2"]
    assert (verdict["ranks"], verdict["in_graph"]) == (2, 2)
    assert verdict["gradient_group"] == "layers.2"
    for side in (verdict["eager"], verdict["graphshard"]):
        assert (side["steps"], side["all_gathers"], side["reduce_scatters"]) == (4, 7, 4)
        assert side["step_time_us"] > 0
        assert side["peak_bytes"] > 0


def test_nothing_is_found_in_the_example(doctor, tmp_path):
    sizes = ("--steps", "5", "--layers", "2", "--seq-len", "64", "--batch", "2")
    out = ("--out", tmp_path / "schedule.html")
    status, verdict, found = doctor(*TORCHRUN, ROOT / "examples/train.py", *sizes, *out)
    assert (status, found) == (0, {})
    assert (verdict["ranks"], verdict["groups"], verdict["in_graph"]) == (2, 3, 3)
    assert verdict["loss_difference"] <= verdict["tolerance"] == 1e-3
    assert verdict["gradient_difference"] <= verdict["tolerance"]
    assert (verdict["modes"], verdict["origin"]) == (["eager", "graphshard"], None)
    assert list(tmp_path.glob("schedule*")) == []  # the doctor ended it before
