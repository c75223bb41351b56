"""Measured times from a file: `measured_of(path)`.

In comes the path of a plan that holds what was measured of it (`Plan.measured`); out comes that.
"""

from __future__ import annotations

from pathlib import Path

from graphshard.measured import Measured
from graphshard.step_plan import Plan


def measured_of(path: Path) -> Measured:
    """Raises OSError if the file cannot be read, ValueError if nothing measured is in it."""
    measured = Plan.from_json(path.read_text(encoding="utf-8")).measured
    if measured is None:
        raise ValueError("it is a plan that was not measured")
    return measured
