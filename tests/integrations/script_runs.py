"""Runs of a script with a real framework, on CPU processes, and what they are allowed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).parent / "run_script.py"
OWN = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
LIMIT_S = 240.0
# Of a loss: Inductor rounds otherwise, and four steps of AdamW follow.
TOLERANCE = 1e-4


def run(*words: str | Path, folder: Path, ranks: int = 2, **environment: str) -> Any:
    """What rank 0 of a script says. ranks: 0: the script starts its own workers."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks else []), *map(str, words)],
        env={**os.environ, **OWN, **environment},
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
