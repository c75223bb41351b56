"""What a plan gains over FSDP2's own schedule, and what more memory would gain, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate
from graphshard.view.brief import LABEL_WIDTH, brief_lines
from graphshard.view.text import bytes_text
from graphshard.view.units import share_text, time_text

# Less is within what times can be told apart by.
NOTICEABLE = 0.002


@dataclass(frozen=True, slots=True)
class Gained:
    """What was predicted of a plan that runs. measured: of the same plan; None: it was not.

    more_us: a whole step with `more_bytes` above the limit; None: not asked.
    """

    name: str
    estimate: Estimate
    measured: Measured | None = None
    more_bytes: int = 0
    more_us: float | None = None


def gain_lines(gained: Gained) -> Iterator[str]:
    yield from brief_lines(gained.estimate, gained.measured)
    if gained.more_us is not None:
        more = _more(gained.estimate.whole_step_us, gained.more_us)
        yield f"{'more'.ljust(LABEL_WIDTH)}{bytes_text(gained.more_bytes)} more would gain {more}"


def _more(now_us: float, more_us: float) -> str:
    gain_us = now_us - more_us
    if gain_us < NOTICEABLE * now_us:
        return "nothing"
    return f"{time_text(gain_us)} a step ({share_text(gain_us, now_us)})"
