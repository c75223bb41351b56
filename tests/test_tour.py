"""A newcomer who types what docs/tour.md says gets what it shows.

Every `shell` block runs, in order, in one folder; a `python` block is a file, named by its first
line. Of a screen, the lines at the left margin have to be there; their numbers may differ.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(python|shell|text)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[+-]?\d[\d,.]*( (s|ms|us|B|[KMGT]iB)\b)?")
# What the commands of the page are called in an environment where graphshard is installed.
COMMANDS = {
    "graphshard": "-m graphshard.cli",
    "torchrun": "-m torch.distributed.run --standalone",
    "python": "",
}


@pytest.fixture
def shell(tmp_path):
    """Runs a command in a folder that looks like a checkout; what it prints to stdout."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in COMMANDS.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GRAPHSHARD_CACHE_DIR": str(tmp_path / "cache"),
    }

    def run(command):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    return run


def headings(screen):
    """The beginnings of the lines at the left margin, without numbers."""
    lines = [line for line in screen.splitlines() if line[:1].strip()]
    return [NUMBER.sub("#", re.split(r"\s{2,}", line)[0]) for line in lines]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour(shell, tmp_path):
    found = BLOCK.findall((ROOT / "docs/tour.md").read_text())
    assert {kind for kind, _ in found} == {"python", "shell", "text"}
    printed = ""
    for kind, text in found:
        if kind == "python":
            (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
        elif kind == "shell":
            printed = "".join(map(shell, text.splitlines()))
        else:
            missing = [line for line in headings(text) if line not in headings(printed)]
            assert missing == [], printed
    for name in ("llama3_70b.plan.json", "llama3_70b.html", "train.html", "train.trace.json"):
        assert (tmp_path / name).stat().st_size > 0
