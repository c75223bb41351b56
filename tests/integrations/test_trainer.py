"""Trainer with what users turn on: gradient accumulation, clipping, bf16, checkpointing of
activations, a scheduler, evaluation, saving, resuming, generation. The bits are eager FSDP2's, or,
where the processor makes AOTAutograd's bfloat16 ops differ from eager torch's, `aot_eager`'s.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_runs import LIMIT_S, OWN, RUNNER, TOLERANCE, run

pytestmark = pytest.mark.timeout(6 * LIMIT_S)

SCRIPT = Path(__file__).parent / "trainer_features.py"
EAGER = {"GRAPHSHARD_DISABLE": "1"}
OPS = {"GRAPHSHARD_OPTIONS": "compute=aten"}
LAST_BITS = 1e-5


def trained(folder: Path, environment: dict[str, str], start: Path | None = None) -> Any:
    folder.mkdir()
    more = {} if start is None else {"FROM": str(start / "out" / "checkpoint-2")}
    return run(RUNNER, SCRIPT, folder=folder, **environment, **more)


def test_the_same_and_the_same_again_after_a_resume(tmp_path: Path) -> None:
    eager, ops = tmp_path / "eager", tmp_path / "ops"
    expected, found = trained(eager, EAGER), trained(ops, OPS)
    assert is_near(found["losses"], expected["losses"])
    assert found["losses"] == expected["losses"] or is_aotautograds(tmp_path)
    captured, present, plans = found["groups"]
    assert captured == present
    assert plans == 2  # training and evaluation
    again = [
        trained(tmp_path / f"{number}", how, start)["losses"]
        for number, (how, start) in enumerate(
            [(EAGER, eager), (EAGER, ops), (OPS, eager), (OPS, ops)]
        )
    ]
    assert all(is_near(other, again[0]) for other in again)
    assert again[0][-3:] == expected["losses"][-3:]  # what it generates
    assert again[3][-3:] == found["losses"][-3:]


def is_near(found: list[list[Any]], expected: list[list[Any]]) -> bool:
    pairs = [
        (a, b) for rows in zip(found, expected, strict=True) for a, b in zip(*rows, strict=True)
    ]
    return all(a == (None if b is None else pytest.approx(b, rel=LAST_BITS)) for a, b in pairs)


def is_aotautograds(folder: Path) -> bool:
    """The doctor finds the same bits with `aot_eager`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [sys.executable, *torchrun, str(RUNNER), str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, "-m", "graphshard.cli", "doctor", "--json", "--steps", "4", "--", *script],
        env={**os.environ, **OWN, **OPS}, cwd=folder, capture_output=True, text=True,
        timeout=4 * LIMIT_S, check=False,
    )  # fmt: skip
    origin = json.loads(done.stdout)["origin"]
    return bool(origin["cause"] == "aotautograd" and origin["is_same"])


def test_with_inductor(tmp_path: Path) -> None:
    expected = trained(tmp_path / "eager", EAGER)["losses"]
    found = trained(tmp_path / "fused", {})["losses"]
    for mine, theirs in zip(found, expected, strict=True):
        if all(value is not None for value in theirs):
            assert mine == pytest.approx(theirs, rel=100 * TOLERANCE)  # bf16
