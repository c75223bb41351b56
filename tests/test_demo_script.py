"""`make demo`: what it compares, and that it fails where graphshard is not equal to eager FSDP2."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.figures import ROOT
from bench.models import CONFIGS
from bench.modes import BY_NAME
from examples import comparison, demo
from examples.comparison import CLOSE, Column, Comparison, Run, compared

COLUMNS = tuple(
    Column(name, [5.5, 4.5, 4.0], 900.0, ms, 10_000_000)
    for name, ms in (("eager FSDP2", 490.0), ("graphshard", 430.0), ("bit by bit", 500.0))
)
GOOD = Comparison(COLUMNS, equal=True, resumes=True, apart=1e-6)
SLOW = {
    "eager FSDP2": demo.Emulated(1000.0, 700.0, 109_000_000),
    "graphshard": demo.Emulated(500.0, 200.0, 112_000_000),
}


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_of(name, losses, weight=1.0):
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)
    seconds = dict.fromkeys(losses, 0.25)
    return Run(name, model, torch.optim.SGD(model.parameters()), losses, seconds, 8)


def test_a_bit_makes_a_difference(alone):
    losses = {0: 5.5, 1: 4.5, 2: 4.0}
    bit = {**losses, 2: torch.tensor(4.0).nextafter(torch.tensor(5.0)).item()}
    eager, default = run_of("eager", losses), run_of("default", bit)
    exact, resumed = run_of("exact", losses), run_of("resumed", {2: 4.0})
    found = compared(eager, default, exact, resumed)
    assert found.holds
    assert 0 < found.apart < CLOSE
    assert found.columns[0] == Column("eager", [5.5, 4.5, 4.0], 250.0, 250.0, 8)
    assert not compared(eager, default, run_of("exact", bit), resumed).equal
    assert not compared(eager, default, run_of("exact", losses, 1.5), resumed).equal
    assert not compared(eager, default, exact, run_of("resumed", {2: bit[2]})).resumes


@pytest.mark.parametrize("wrong", [{"equal": False}, {"resumes": False}, {"apart": 2 * CLOSE}])
def test_what_does_not_hold(wrong):
    assert GOOD.holds
    assert not replace(GOOD, **wrong).holds


def test_the_table_has_the_three_columns():
    first, *rows = comparison.table(GOOD).splitlines()
    assert first.split("  ")[-1].strip() == "bit by bit"
    titles = [row[:20].strip() for row in rows]
    assert titles[-3:] == ["first step", "step", "gathered at peak"]
    for title in titles[-3:]:
        assert f"\n  {title} " in comparison.MEANING


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_the_verdict_and_the_exit_status(equal, status, monkeypatch, capsys):
    def train(processes, facts):
        facts.write_text(json.dumps(asdict(replace(GOOD, equal=equal))))
        return status

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "on_a_slow_link", lambda: SLOW)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == status
    out = capsys.readouterr().out
    verdict = " ".join(out.split())
    assert f"equal to eager FSDP2 to the last bit: {'yes' if equal else 'NO'}." in verdict
    assert "500 ms instead of 1,000, 2.00 times as fast, with 3 MB more." in verdict
    assert len(out.split("\nnext\n")[1].splitlines()) == 3


def test_a_training_that_dies_is_no_success(monkeypatch):
    monkeypatch.setattr(demo, "train", lambda processes, facts: 9)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 9


def test_the_slow_link_has_the_models_shapes():
    config = CONFIGS["DEMO"]
    assert (config.dim, config.num_layers, config.seq_len, config.batch) == (256, 8, 128, 4)
    assert set(demo.MODES.values()) <= BY_NAME.keys()


@pytest.mark.dist
@pytest.mark.slow
def test_the_training_script_itself(tmp_path):
    sizes = ("--steps", "4", "--dim", "32", "--layers", "1", "--seq-len", "32", "--batch", "1")
    out = ("--out", str(tmp_path / "schedule.html"), "--facts", str(tmp_path / "facts.json"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(ROOT / "examples/train.py"), *sizes, *out],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "equal to eager FSDP2 to the last bit: yes    resumed equally: yes" in done.stdout
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["equal"]
    assert [len(column["losses"]) for column in facts["columns"]] == [4, 4, 4]
    assert (tmp_path / "schedule.html").stat().st_size > 0
