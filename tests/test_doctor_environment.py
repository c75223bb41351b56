"""What the doctor says of the environment, how its screens look, and how it launches a command."""

import json
import re
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import as_aot, changed, examined, ranks, run

from graphshard.cli import main
from graphshard.doctor import attach, environment
from graphshard.doctor.environment import Probe
from graphshard.doctor.examine import Examination
from graphshard.doctor.findings import Level, fault, warning, worst
from graphshard.doctor.launch import run_watched
from graphshard.doctor.text import WIDTH, environment_text, examination_text
from graphshard.errors import DoctorError

ROOT = Path(__file__).parents[1]


def test_the_supported_torch_is_what_the_package_declares():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"][0]
    assert declared == f"torch>={'.'.join(map(str, environment.OLDEST_TORCH))}"


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.13.0+cu130", None),
        ("2.11.0", None),
        ("2.15.2", None),
        ("2.10.1", Level.FAULT),
        ("2.16.0a0", Level.WARNING),
    ],
)
def test_versions_of_torch(version, level):
    finding = environment.probe_torch(version).finding
    assert (finding and finding.level) == level
    assert finding is None or finding.code == "GS1101"


def raises(error):
    def find():
        raise error

    return find


@pytest.mark.parametrize(
    ("probe", "code", "level"),
    [
        (environment.probe_backend(["inductor"]), "GS1102", Level.FAULT),
        (environment.probe_collectives(True, False, num_gpus=8), "GS1103", Level.FAULT),
        (environment.probe_collectives(False, False, num_gpus=0), "GS1103", Level.FAULT),
        (environment.probe_compiler(raises(OSError("no g++")), has_gpu=False), "GS1104", "fault"),
        (environment.probe_compiler(raises(OSError("no g++")), has_gpu=True), "GS1104", "warning"),
        (environment.probe_cache(raises(PermissionError(13, "denied"))), "GS1105", Level.FAULT),
    ],
)
def test_what_is_missing(probe, code, level):
    assert (probe.finding.code, probe.level) == (code, level)


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    probe = environment.probe_cache(lambda: tmp_path / "cache")
    assert probe.finding.code == "GS1105"
    assert str(tmp_path) in probe.finding.what


def test_enough():
    assert environment.probe_collectives(True, False, num_gpus=0).level is Level.OK
    assert environment.probe_backend(["graphshard"]).level is Level.OK
    assert environment.devices_text(["H200", "H200"], 8) == "2 x H200, CPU with 8 cores"


# -- what is printed ------------------------------------------------------------------------------


def test_this_environment(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[-1] for line in out.splitlines()[2:8]] == ["ok"] * 6
    assert out.endswith("nothing found\n")
    assert err == ""


def test_a_faulty_environment(capsys, monkeypatch):
    probes = (Probe("cache", "/x", fault("GS1105", "cannot write", "chmod")),)
    monkeypatch.setattr(environment, "probe_environment", lambda: probes)
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["level"], told["probes"][0]["finding"]["code"]) == ("fault", "GS1105")


def test_the_screens_fit():
    others = (changed(0, b=(1.0,)), ranks(), as_aot(ranks()))
    found, _ = examined(*map(run, (ranks(), *others)))
    long = replace(found, command=("torchrun", *(["--long-option"] * 20)))
    for text in (examination_text(long), environment_text((Probe("x", "y" * 200),))):
        assert max(map(len, text.splitlines())) <= WIDTH
        assert text.isascii()
    table = examination_text(found)
    assert "2 ranks, 2 steps, 2 of 2 groups in a graph" in table
    assert re.search(r"step time, median +1\.00 ms +1\.00 ms", table)
    assert re.search(r"all-gathers per step +5 +5\n", table)
    assert re.search(r"largest difference of a gradient +\S+ +at most 0\.001  at b", table)
    assert "fault    GS1111  the gradients of b" in table
    assert "differs first             gradients of b, in step 0\n" in table
    assert "not AOTAutograd's: aot_eager does not differ from eager FSDP2" in table


def test_levels():
    assert worst(()) is Level.OK
    assert worst((warning("a", "b", "c"),)) is Level.WARNING
    assert worst((warning("a", "b", "c"), fault("a", "b", "c"))) is Level.FAULT
    assert Examination((), None, ()).level is Level.OK


def test_a_sitecustomize_of_the_user_still_runs(tmp_path, monkeypatch):
    """The doctor's own one, which is first on the path, is passed over."""
    for folder in ("hook", "user"):
        (tmp_path / folder).mkdir()
        text = f"import sys; sys.modules['doctor_ran_{folder}'] = sys"
        (tmp_path / folder / "sitecustomize.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        monkeypatch.delitem(sys.modules, f"doctor_ran_{folder}", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hook"), *sys.path])
    monkeypatch.setenv(attach.FOLDER, str(tmp_path))
    attach.attach()
    assert ("doctor_ran_user" in sys.modules, "doctor_ran_hook" in sys.modules) == (True, False)
    del sys.modules["doctor_ran_user"]


@pytest.mark.parametrize("steps", ["-1", "x", "1.5"])
def test_steps_that_are_none(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--steps", steps, "--", "true"])
    assert "is not a number of steps" in capsys.readouterr().err


# -- the launch -----------------------------------------------------------------------------------


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(DoctorError, match="GS1141: cannot start no-such-program"):
        run_watched(["no-such-program"], "eager", 1, 1.0)
    assert main(["doctor", "--", "no-such-program"]) == 2
    assert "GS1141" in capsys.readouterr().err


def test_what_hangs_is_stopped_with_its_children(tmp_path):
    """The child is in a session of its own, as torchrun's ranks are, and ignores signals."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-S', '-c', {child!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    # -S: without sitecustomize, and so without torch.
    stopped = run_watched([sys.executable, "-S", "-c", parent], "eager", 1, 5.0)
    assert (stopped.status, stopped.is_whole) == (None, False)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or _is_zombie(pid):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child is still there")


def _is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
