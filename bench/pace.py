"""How fast this machine is at the moment: a model's step in plain PyTorch, beside what is measured.

The CPU time of one and the same step drifts by tens of per cent where other virtual machines share
the processor and its caches. In: a network on the CPU's clock, and what such a step took when
compute was calibrated. Out: the network's clock, at the pace of that time. Assumed: what slows this
step slows the same model's sharded step as much; it has the same kernels on as much memory.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import nn

from bench.models import Config, make_batch, make_model

WINDOW = 8  # steps: a single one moves by 8 % from one to the next, a second apart by more


@dataclass(slots=True)
class Pace:
    """seen_us: what the last steps took."""

    config: Config
    model: nn.Module
    seen_us: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def look(self) -> float:
        """Runs a step. CPU time on the median of the last ones."""
        tokens, targets = make_batch(self.config, 0)
        began = time.thread_time()
        self.model(tokens, targets).backward()
        self.seen_us.append(1e6 * (time.thread_time() - began))
        self.model.zero_grad()
        return median(self.seen_us)


def pace_of(config: Config, num_ranks: int) -> Pace:
    """Warm."""
    pace = Pace(config, make_model(config, num_ranks))
    for _ in range(WINDOW):
        pace.look()
    return pace


def keep_pace(network: Any, pace: Pace, reference_us: float) -> None:
    """Let the network's clock run, from now on, as if the step took `reference_us`."""
    network.set_speed(pace.look() / reference_us)
