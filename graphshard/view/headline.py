"""The first line of a page: the figures of the plan, FSDP2's beside them, and what was measured.

In comes a `Sheet`; out come `Figure`s, the most telling first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate
from graphshard.view.optimizer import share_text
from graphshard.view.sheet import Sheet
from graphshard.view.text import bytes_text
from graphshard.view.units import change_text, time_text


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name; beside: what it is to be compared with, name and value each."""

    name: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()


def headline(sheet: Sheet) -> list[Figure]:
    return list(_predicted(sheet.plan.estimate, sheet.measured))


def _predicted(estimate: Estimate, measured: Measured | None) -> Iterator[Figure]:
    ours, fsdp2 = estimate.ours, estimate.fsdp2
    yield Figure(
        "step", time_text(estimate.whole_step_us),
        (_theirs(estimate.whole_step_us, estimate.whole_fsdp2_us), *_of_step(estimate, measured)),
    )  # fmt: skip
    seen = () if measured is None else (("measured", time_text(measured.exposed_us)),)
    yield Figure(
        "exposed communication", time_text(ours.exposed_us),
        (_theirs(ours.exposed_us, fsdp2.exposed_us), *seen),
    )  # fmt: skip
    change = _changed(ours.peak_bytes, fsdp2.peak_bytes)
    yield Figure(
        "peak memory", bytes_text(ours.peak_bytes),
        (("FSDP2", bytes_text(fsdp2.peak_bytes) + change),
         ("budget", bytes_text(estimate.budget_bytes))),
    )  # fmt: skip
    bound = ("at most", f"{estimate.gap:.1%} left to gain".replace("%", " %"))
    yield Figure("lower bound", time_text(estimate.whole_bound_us), (bound,))


def _theirs(ours_us: float, fsdp2_us: float) -> tuple[str, str]:
    return "FSDP2", time_text(fsdp2_us) + _changed(ours_us, fsdp2_us)


def _of_step(estimate: Estimate, measured: Measured | None) -> Iterator[tuple[str, str]]:
    """The optimizer's part; and the rest as it was measured, which leaves the optimizer out."""
    if estimate.optimizer is not None:
        yield "of it optimizer", f"{time_text(estimate.optimizer_us)} ({share_text(estimate)})"
    if measured is None:
        return
    seen = time_text(measured.step_time_us)
    if estimate.optimizer is None:
        yield "measured", seen
    else:
        yield "measured without it", f"{seen} of {time_text(estimate.step_time_us)}"


def _changed(now: float, before: float) -> str:
    """In brackets, from FSDP2's figure to the plan's."""
    text = change_text(now, before)
    return f" ({text})" if text and now != before else ""
