"""The command line: exit statuses, what goes to which stream, and that torch stays out."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from plans import two_layers

from graphshard.cli import main
from graphshard.cli.common import sizes as sizes_of

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
    assert json.loads(capsys.readouterr().out) == two_layers().summary()


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
@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00", b'{"schema": 3}'])
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


@pytest.mark.parametrize("verb", ["help", "view"])
def test_it_answers_at_once(verb, file, tmp_path):
    """In processor time, the least of five: other processes and a cold disk are not its doing."""
    argv = ["--help"] if verb == "help" else ["view", str(file), "-o", str(tmp_path / "x.html")]
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "graphshard.cli", *argv]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3, spent


def test_exit_status_of_the_process(tmp_path):
    command = [sys.executable, "-m", "graphshard.cli", "show", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("graphshard: error: cannot read")


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
