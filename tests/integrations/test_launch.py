"""`accelerate launch --dynamo_backend graphshard`, with the name added."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import graphshard.integrations.accelerate
from accelerate import Accelerator

print(Accelerator().state.dynamo_plugin.to_kwargs()["backend"])
"""


def test_the_name_reaches_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = ["launch", "--cpu", "--num_processes", "1", "--dynamo_backend", "graphshard"]
    done = subprocess.run(
        [sys.executable, "-m", "graphshard.integrations.accelerate", *launch, str(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "graphshard"
