"""Trainer with what users turn on: gradient accumulation, clipping, bf16, checkpointing of
activations, a scheduler, evaluation, saving, resuming, generation. The bits are eager FSDP2's.
"""

from pathlib import Path
from typing import Any

import pytest
from test_scripts import LIMIT_S, RUNNER, TOLERANCE, run

pytestmark = pytest.mark.timeout(6 * LIMIT_S)

SCRIPT = Path(__file__).parent / "trainer_features.py"
EAGER = {"GRAPHSHARD_DISABLE": "1"}
OPS = {"GRAPHSHARD_OPTIONS": "compute=aten"}


def trained(folder: Path, environment: dict[str, str], start: Path | None = None) -> Any:
    folder.mkdir()
    more = {} if start is None else {"FROM": str(start / "out" / "checkpoint-2")}
    return run(RUNNER, SCRIPT, folder=folder, **environment, **more)


def test_the_same_and_the_same_again_after_a_resume(tmp_path: Path) -> None:
    eager, ops = tmp_path / "eager", tmp_path / "ops"
    expected, found = trained(eager, EAGER), trained(ops, OPS)
    assert found["losses"] == expected["losses"]
    captured, present, plans = found["groups"]
    assert captured == present
    assert plans == 2  # training and evaluation
    again = [
        trained(tmp_path / f"{number}", how, start)["losses"]
        for number, (how, start) in enumerate(
            [(EAGER, eager), (EAGER, ops), (OPS, eager), (OPS, ops)]
        )
    ]
    assert again == [again[0]] * 4
    assert again[0][-3:] == expected["losses"][-3:]  # what it generates


def test_with_inductor(tmp_path: Path) -> None:
    expected = trained(tmp_path / "eager", EAGER)["losses"]
    found = trained(tmp_path / "fused", {})["losses"]
    for mine, theirs in zip(found, expected, strict=True):
        if all(value is not None for value in theirs):
            assert mine == pytest.approx(theirs, rel=100 * TOLERANCE)  # bf16
