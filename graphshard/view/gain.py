"""What a plan gains over FSDP2's own schedule, and what more memory would gain, in two lines."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.view.text import bytes_text
from graphshard.view.units import time_text

# Less is within what times can be told apart by.
NOTICEABLE = 0.002


@dataclass(frozen=True, slots=True)
class Gained:
    """Times of one step in microseconds, predicted but for `measured_us`; None: not measured.

    optimizer_us: part of the predicted ones, and not of what was measured.
    more_us: with `more_bytes` more than `limit_bytes`; None: not asked.
    """

    name: str
    planned_us: float
    fsdp2_us: float
    peak_bytes: int
    limit_bytes: int
    measured_us: float | None = None
    optimizer_us: float = 0.0
    more_bytes: int = 0
    more_us: float | None = None


def gain_lines(gained: Gained) -> tuple[str, str]:
    """Of its time, and of its memory."""
    ratio = gained.fsdp2_us / gained.planned_us if gained.planned_us else 1.0
    took = "" if gained.measured_us is None else f"; measured {time_text(gained.measured_us)}"
    own = ""
    if gained.optimizer_us:
        own = f", of it optimizer {time_text(gained.optimizer_us)}"
        took += took and " without it"
    step = (
        f"{time_text(gained.planned_us)} in {gained.name}{own}, {ratio:.2f} x as fast as FSDP2's "
        f"own schedule, {time_text(gained.fsdp2_us)} (predicted{took})"
    )
    room = f"{bytes_text(gained.peak_bytes)} of {bytes_text(gained.limit_bytes)} in {gained.name}"
    return step, room + _more(gained)


def _more(gained: Gained) -> str:
    if gained.more_us is None:
        return ""
    more = f"; {bytes_text(gained.more_bytes)} more would gain"
    gain_us = gained.planned_us - gained.more_us
    if gain_us < NOTICEABLE * gained.planned_us:
        return f"{more} nothing"
    share = f"{gain_us / gained.planned_us:.1%}".replace("%", " %")
    return f"{more} {time_text(gain_us)} a step ({share})"
