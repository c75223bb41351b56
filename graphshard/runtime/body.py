"""The code of one direction, as it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphshard.runtime.stopwatch import Stopwatch


@dataclass(slots=True)
class Body:
    """What one direction runs; replaced between steps, never during one.

    exact_sums: see `graphshard.runtime.run.Run`. overlaps: see `graph_order.turn_of`. watched: with
    marks, so that each run leaves its stopwatch in `watches`.
    """

    call: Callable[[list[Any]], Any]
    exact_sums: bool = True
    overlaps: bool = True
    watched: bool = False
    watches: list[Stopwatch] = field(default_factory=list)
