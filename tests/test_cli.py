"""The command line: exit statuses, what goes to which stream, and that torch stays out."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from forecasts import as_predicted, planned
from planning import layers
from plans import two_layers

from graphshard.cli import main
from graphshard.cli.common import sizes as sizes_of
from graphshard.view.comparison import comparison_text
from graphshard.view.diff import diff
from graphshard.view.diff_text import diff_text
from graphshard.view.html import render
from graphshard.view.log_text import log_text

ROOT = Path(__file__).parent.parent


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "toy.plan.json"
    path.write_text(two_layers().to_json(), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "page"),
    [("toy.plan.json", "toy.html"), ("toy.json", "toy.html"), ("toy", "toy.html")],
)
def test_view_writes_next_to_the_plan_and_prints_the_path(tmp_path, capsys, name, page):
    (tmp_path / name).write_text(two_layers().to_json(), encoding="utf-8")
    assert main(["view", str(tmp_path / name)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{tmp_path / page}\n", "")
    assert (tmp_path / page).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_view_writes_where_it_is_told(file, tmp_path, capsys):
    out = tmp_path / "schedule.html"
    assert main(["view", str(file), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out)}
    assert out.exists()
    assert not (tmp_path / "toy.html").exists()


def test_show_prints_the_summary(file, capsys):
    assert main(["show", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "all-gathers" in out
    assert err == ""


def test_show_json_is_the_plans_summary(file, capsys):
    assert main(["show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(asdict(two_layers().summary()))
    )


def fails(capsys, *argv):
    """The one line on stderr of a command that exits with status 2 and prints no result."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("graphshard: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("verb", ["view", "show"])
def test_missing_file(verb, tmp_path, capsys):
    assert "No such file" in fails(capsys, verb, tmp_path / "none.json")


@pytest.mark.parametrize("verb", ["view", "show"])
@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00", b'{"schema": 4}'])
def test_not_a_plan(verb, content, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert "bad.json is not a plan: " in fails(capsys, verb, path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_a_plan(tmp_path, capsys):
    assert "cannot read" in fails(capsys, "show", tmp_path)


def test_view_into_a_missing_folder(file, tmp_path, capsys):
    assert "cannot write" in fails(capsys, "view", file, "-o", tmp_path / "none" / "x.html")


def test_view_does_not_overwrite_the_plan(file, capsys):
    assert "it is the plan itself" in fails(capsys, "view", file, "-o", file)
    assert file.read_text(encoding="utf-8") == two_layers().to_json()


@pytest.mark.parametrize("argv", [[], ["draw"], ["view"], ["show", "a", "b"], ["show", "--what"]])
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: graphshard" in err


@pytest.mark.parametrize("argv", [["--help"], ["view", "--help"], ["--version"]])
def test_help_and_version_exit_0(argv, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(argv)
    assert "graphshard" in capsys.readouterr().out


def test_no_command_imports_torch(file, tmp_path):
    code = f"""
import sys
from graphshard import cli
from graphshard.cli import main
assert main(["show", {str(file)!r}]) == 0
assert main(["view", {str(file)!r}, "-o", {str(tmp_path / "x.html")!r}]) == 0
assert main(["machines"]) == main(["machines", "h100"]) == 0
try:
    main(["--version"])
except SystemExit as done:
    assert done.code == 0
loaded = {{"torch", "sympy", "networkx", "numpy"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def least_cpu_s(*argv):
    """Of five: other processes and a cold disk are not its doing."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *argv], cwd=ROOT, capture_output=True, check=True, timeout=60
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


@pytest.mark.parametrize("verb", ["help", "view"])
def test_it_answers_at_once(verb, file, tmp_path):
    """0.25 s where Python takes 0.1 s for small modules that a command reads; torch takes 2.2 s."""
    argv = ["--help"] if verb == "help" else ["view", str(file), "-o", str(tmp_path / "x.html")]
    small_s = least_cpu_s("-c", "import argparse, dataclasses, inspect, jinja2, json, tomllib")
    assert least_cpu_s("-m", "graphshard.cli", *argv) < 6 * small_s


def test_exit_status_of_the_process(tmp_path):
    command = [sys.executable, "-m", "graphshard.cli", "show", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("graphshard: error: GS1203: cannot read")


def test_calibrate_runs_under_torchrun_only(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert "GS504: start it with torchrun" in fails(capsys, "calibrate")


@pytest.mark.parametrize("sizes", ["", "64XB", "MiB", "-4096", "4096,,8192"])
def test_sizes_that_are_none(sizes, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", f"--sizes={sizes}"])
    assert "is not a size such as" in capsys.readouterr().err


def test_sizes_in_bytes():
    assert sizes_of("4096, 64KiB,1mib") == (4096, 65536, 2**20)


def shell(command, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "G": f"{sys.executable} -m graphshard.cli"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("$G show toy.plan.json | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("$G show toy.plan.json --json | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("$G show toy.plan.json >/dev/full", 2, "GS1203: cannot write the result: No space left"),
        ("$G show toy.plan.json --json >/dev/full", 2, "GS1203: cannot write the result: No space"),
        ("$G show toy.plan.json >&-", 2, "GS1203: cannot write the result: it is closed"),
        ("$G view toy.plan.json -o /dev/full", 2, "GS1203: cannot write /dev/full: No space"),
        ("$G show no.json 2>&-", 2, ""),
        ("$G show no.json 2>/dev/full", 2, ""),
        ("LC_ALL=C PYTHONIOENCODING=ascii $G show toy.plan.json", 0, ""),
    ],
)
def test_streams_that_take_nothing(file, tmp_path, command, status, says):
    plan = json.loads(file.read_text())
    plan["name"] = "\u5c42 \ud800 \u001b[31m"
    file.write_text(json.dumps(plan))
    # The reader of a pipe has to be gone before anything is written.
    done = shell(command.replace("| true", "| exec 0<&- true"), tmp_path)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "x.py:f", "--world", "9" * 20, "--hw", "h100"],
        ["plan", "x.py:f", "--world", "9" * 5000, "--hw", "h100"],
        ["plan", "x.py:f", "--world", "8", "--hw", "h100", "--budget", "9" * 400],
        ["plan", "x.py:f", "--world", "8", "--hw", "h100", "--micro-steps", "9" * 20],
        ["doctor", "--limit-s", "nan"],
        ["doctor", "--steps", "9" * 20],
        ["calibrate", "--repetitions", "0"],
    ],
)
def test_numbers_that_are_none(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert "argument --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["plan", "x.py:f", "--world", "8", "--hw", "missing.json"], "GS906"),
        (
            ["plan", "{own}:f", "--world", "8", "--hw", "missing.json"],
            "GS1203: cannot read missing",
        ),
        (
            ["plan", "{own}:f", "--world", "8", "--hw", "a\0.json"],
            "GS1203: cannot read a\\x00.json",
        ),
        (["plan", "n" * 5000 + ".py:f", "--world", "8", "--hw", "h100"], "GS906"),
        (["show", "n" * 5000], "GS1203: cannot read"),
        (["show", "a\0b"], "GS1203: cannot read a\\x00b: embedded null byte"),
        (["show", "/dev/zero"], "GS1203: cannot read /dev/zero: it is no file"),
        (["show", "{plan}", "--group", "\x1b[31m"], "GS105"),
        (["view", "{plan}", "-o", "n" * 5000], "GS1203: cannot write"),
        (["view", "{plan}", "-o", "a\0b"], "GS1203: cannot write a\\x00b"),
        (
            ["view", "{plan}", "--perfetto", "p", "--merge", "\x1b[31m"],
            "GS1203: cannot read \\x1b[31m",
        ),
    ],
)
def test_odd_arguments(file, tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = tmp_path / "own.py"
    own.write_text("def f(): pass")
    words = [word.replace("{own}", str(own)).replace("{plan}", str(file)) for word in argv]
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "\x1b" not in err


NAME = "a\x1b[31mb\nc\x9bd\u202e[red]"
SHOWN = r"a\x1b[31mb\nc\x9bd\u202e[red]"


def renamed(plan):
    groups = tuple(replace(g, fqn=f"{NAME}{g.id}") for g in plan.groups)
    return replace(plan, name=NAME, groups=groups)


@pytest.mark.parametrize("argv", [["show"], ["show", "--why"], ["show", "--group", f"{NAME}0"]])
def test_what_a_terminal_would_obey_is_shown(tmp_path, capsys, argv):
    plan = renamed(two_layers())
    file = tmp_path / "x.json"
    file.write_text(plan.to_json())
    assert main([*argv, str(file)]) == 0
    out = capsys.readouterr().out
    assert SHOWN in out
    assert not set(out) & set("\x1b\x9b\u202e")
    assert len(out.splitlines()) == len(text_of(argv, two_layers(), tmp_path, capsys).splitlines())


def text_of(argv, plan, tmp_path, capsys):
    file = tmp_path / "plain.json"
    file.write_text(plan.to_json())
    words = [word.replace(f"{NAME}0", "layers.0") for word in argv]
    assert main([*words, str(file)]) == 0
    return capsys.readouterr().out


def test_pages_logs_and_comparisons_show_it_too():
    plan = renamed(planned(layers(3, activations=100)))
    after = replace(plan, forecasts=plan.fsdp2.forecasts)
    forward, *backward = plan.fsdp2.schedules
    after = replace(after, forward=forward, backward=backward[0])
    texts = [
        render(plan),
        log_text(plan),
        diff_text(diff(plan, after)),
        comparison_text(plan, plan.compare(as_predicted(plan))),
    ]
    for text in texts:
        assert not set(text) & set("\x1b\x9b\u202e"), text[:200]
    assert SHOWN in texts[1]


def test_a_file_of_no_plans_size(tmp_path, capsys):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**28 + 1)
    assert "GS1204: " in fails(capsys, "show", tmp_path / "large")
