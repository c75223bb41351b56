"""`graphshard plan` and the user's file: whose error it is, what it may replace and fill."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphshard.cli import main

ROOT = Path(__file__).parents[1]

MODELS = """
import sys, torch
import beside
from torch import nn
from torch.distributed.fsdp import fully_shard

def good():
    model = nn.Linear(4, 4)
    fully_shard(model)
    return model, torch.zeros(2, 4)

def exits():
    sys.exit(3)

def empty():
    return torch.empty(2**30, device="cpu")

def grown():
    return torch.arange(10, device="cpu").expand(2**30, 10).contiguous()

def many():
    return [torch.zeros(2**26, device="cpu") + 1 for _ in range(8)]

def little():
    model, inputs = good()
    model.register_buffer("table", torch.zeros(2**10, device="cpu") + 1)
    return model, inputs

def deep():
    return deep()

def shards_badly():
    def shard(model):
        raise KeyError("no such layer")
    return nn.Linear(4, 4), torch.zeros(2, 4), shard
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(function)` plans it, from a file that has the name of a module of Python's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "inspect.py").write_text(MODELS)

    def call(function, file="inspect.py"):
        target = f"{tmp_path / file}:{function}"
        status = main(["plan", target, "--world", "2", "--hw", "h100"])
        return status, capsys.readouterr().err

    yield call
    sys.modules.pop("beside", None)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", ["good", "little"])
def test_a_file_called_inspect(run, tmp_path, function):
    assert run(function)[0] == 0
    assert sys.modules["inspect"] is inspect
    assert Path(inspect.__file__).parent != tmp_path
    places = {entry: place for place, entry in enumerate(sys.path)}
    assert places[str(tmp_path)] > places[str(Path(inspect.__file__).parent)]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("exits", r"GS911: exits fails at .*inspect.py:13: SystemExit: 3"),
        ("deep", r"GS911: deep fails at .*inspect.py:30: RecursionError"),
        (
            "shards_badly",
            r"GS911: shards_badly fails at .*inspect.py:34: KeyError: 'no such layer'",
        ),
    ],
)
def test_a_function_that_fails_has_a_status_of_its_own(run, function, says):
    status, said = run(function)
    assert status == 4
    assert re.search(says, said), said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:", "broken.py:1: SyntaxError: invalid syntax"),
        ("\nimport no_such_package", "broken.py:2: ModuleNotFoundError: No module named"),
        ("raise ValueError('no')", "broken.py:1: ValueError: no"),
        ("import sys\nsys.exit(3)", "broken.py:2: SystemExit: 3"),
        ("x = '\0'", "source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_fails(run, tmp_path, text, says):
    (tmp_path / "broken.py").write_text(text)
    status, said = run("f", "broken.py")
    assert status == 4
    assert "GS911: " in said
    assert says in said
    assert not [name for name in sys.modules if name.startswith("_graphshard_plan_broken")]


@pytest.mark.parametrize(
    ("function", "line", "size"),
    [("empty", 16, 4 * 2**30), ("grown", 19, 10 * 8 * 2**30 + 80), ("many", 22, 2**30 + 2**28)],
)
def test_what_would_fill_memory_is_refused_before(run, tmp_path, function, line, size):
    code = (
        "import resource, sys\n"
        "from graphshard.cli import main\n"
        f"status = main(['plan', 'inspect.py:{function}', '--world', '2', '--hw', 'h100'])\n"
        "print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
    )
    status, peak_bytes = map(int, done.stdout.split())
    assert status == 1
    assert f"GS902: {tmp_path}/inspect.py:{line}: " in done.stderr
    assert f"on cpu to {size:,} bytes" in done.stderr
    assert peak_bytes < 1.7 * 2**30


def test_a_row_that_does_not_fit_is_exit_status_3(run, tmp_path, capsys):
    argv = ["plan", str(tmp_path / "inspect.py:good"), "--world", "2,4", "--hw", "h100", "--json"]
    assert main([*argv, "--budget", "1GiB"]) == 0
    assert main([*argv, "--budget", "16,1GiB"]) == 3
    found = capsys.readouterr().out
    rows = json.loads(found[found.rindex("\n{") :])["rows"]
    assert [bool(row["why_not"]) for row in rows] == [True, False] * 2
