"""From FSDP2's step to the plan's, one kind of decision after the other: bars that add up.

In comes a plan with reasons; out come `Bar`s, FSDP2's first and the plan's last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.schedule.plan import Plan
from graphshard.schedule.reasons import Gain
from graphshard.view.reasons import DECISIONS
from graphshard.view.text import bytes_text
from graphshard.view.units import time_text

WIDTH = 1000.0
ROOM = 0.12  # of the picture, left of the shortest step
LEAST = 4.0  # so wide is a bar at least


@dataclass(frozen=True, slots=True)
class Bar:
    """x, width: of WIDTH. way: "whole" (a step), "better", "worse" or "same"."""

    name: str
    x: float
    width: float
    way: str
    time: str
    memory: str


def waterfall(plan: Plan) -> list[Bar]:
    """Empty without gains; times are of whole steps."""
    estimate = plan.estimate
    gains = [reason for reason in plan.reasons if isinstance(reason, Gain)]
    if not gains:
        return []
    levels = [estimate.whole_fsdp2_us]
    for gain in gains:
        levels.append(levels[-1] - gain.gain_us)
    return list(_bars(gains, levels, estimate.fsdp2.peak_bytes, estimate.ours.peak_bytes))


def _bars(
    gains: list[Gain], levels: list[float], before_bytes: int, after_bytes: int
) -> Iterator[Bar]:
    low, high = min(levels), max(levels)
    span = high - low or high or 1.0

    def at(us: float) -> float:
        """The shortest step has a bar, too: the axis does not begin at 0."""
        return WIDTH * (ROOM + (1 - ROOM) * (us - low) / span)

    yield Bar("FSDP2", 0.0, at(levels[0]), "whole", time_text(levels[0]), bytes_text(before_bytes))
    for gain, before_us, after_us in zip(gains, levels, levels[1:], strict=False):
        left, right = sorted((at(before_us), at(after_us)))
        way = "same" if gain.gain_us == 0 else "better" if gain.gain_us > 0 else "worse"
        yield Bar(
            DECISIONS[gain.decision],
            min(left, WIDTH - LEAST),
            max(right - left, LEAST),
            way,
            _signed(-gain.gain_us, time_text(abs(gain.gain_us))),
            _signed(-gain.gain_bytes, bytes_text(abs(gain.gain_bytes))),
        )
    yield Bar(
        "graphshard", 0.0, at(levels[-1]), "whole", time_text(levels[-1]), bytes_text(after_bytes)
    )


def _signed(number: float, text: str) -> str:
    return "" if number == 0 else f"{'-' if number < 0 else '+'}{text}"
