"""What was measured where: the machine, the versions and the commit, as a dict for JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import graphshard


def describe(root: Path) -> dict[str, object]:
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {
            "graphshard": graphshard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": git(root, "rev-parse", "HEAD"),
        "changed_files": git(root, "status", "--porcelain", "--untracked-files=no").splitlines(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def git(root: Path, *args: str) -> str:
    """Empty outside a checkout."""
    try:
        done = subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return ""
    return done.stdout.strip()
