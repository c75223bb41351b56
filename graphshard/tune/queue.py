"""Settings that could still be the best, the most promising first.

A setting gets its bound only where its compute alone could make it the best: bounds take longer.
Assumed: compute alone takes no longer than the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import log

from graphshard.schedule.setting import Setting
from graphshard.tune.pricing import Pricer

# Less than this is no reason to plan one more setting.
TOLERANCE = 0.01


@dataclass(order=True, frozen=True, slots=True)
class Promise:
    """A setting in the queue; the first one is the most promising, in steps of TOLERANCE. is_bound:
    its rate is by its bound, not by its compute alone, which is known sooner. turn: among equal
    promises the first one comes first."""

    step: int
    is_bound: bool
    turn: int
    rate: float = field(compare=False)
    setting: Setting = field(compare=False)


@dataclass(slots=True)
class Queue:
    """Of settings that could still be the best."""

    pricer: Pricer
    budget_bytes: int
    waiting: list[Promise] = field(default_factory=list)
    turns: Iterator[int] = field(default_factory=count)

    def add(self, setting: Setting) -> None:
        self._push(setting, self.pricer.compute_us(setting), next(self.turns), is_bound=False)

    def _push(self, setting: Setting, step_us: float, turn: int, *, is_bound: bool) -> None:
        rate = self.pricer.tokens_per_s(setting, step_us)
        step = -round(log(rate) / TOLERANCE)
        heappush(self.waiting, Promise(step, is_bound, turn, rate, setting))

    def next_is_bound(self) -> bool:
        """Whether there is a next one; it, and all that promise as much, have their bounds then."""
        while self.waiting and not self.waiting[0].is_bound:
            one = heappop(self.waiting)
            bound = self.pricer.bound(one.setting)
            if bound.least_bytes <= self.budget_bytes:
                self._push(one.setting, bound.step_us, one.turn, is_bound=True)
        return bool(self.waiting)

    def pop(self) -> Promise:
        return heappop(self.waiting)
