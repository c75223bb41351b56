"""The first line of a page: the figures of the plan, FSDP2's beside them, and what was measured.

In comes a `Sheet`; out come `Figure`s, the most telling first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphshard.schedule.estimate import Limit
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate
from graphshard.view.brief import left_text
from graphshard.view.optimizer import took_text
from graphshard.view.sheet import Sheet
from graphshard.view.text import bytes_text
from graphshard.view.units import change_text, time_text


@dataclass(frozen=True, slots=True)
class Beside:
    """What a figure is to be compared with. change: from that to the figure, with its sign; way:
    "better" or "worse" of it, "" where neither can be said."""

    name: str
    value: str
    change: str = ""
    way: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name."""

    name: str
    value: str
    beside: tuple[Beside, ...] = ()


def headline(sheet: Sheet) -> list[Figure]:
    return list(_predicted(sheet.plan.estimate, sheet.measured))


def _predicted(estimate: Estimate, measured: Measured | None) -> Iterator[Figure]:
    ours, fsdp2 = estimate.ours, estimate.fsdp2
    step_us = estimate.whole_step_us
    yield Figure(
        "step", time_text(step_us),
        (_theirs(step_us, estimate.whole_fsdp2_us, time_text), *_of_step(estimate, measured)),
    )  # fmt: skip
    seen = () if measured is None else (Beside("measured", time_text(measured.exposed_us)),)
    yield Figure(
        "exposed communication", time_text(ours.exposed_us),
        (_theirs(ours.exposed_us, fsdp2.exposed_us, time_text), *seen),
    )  # fmt: skip
    yield Figure(
        "peak memory", bytes_text(ours.peak_bytes),
        (_peak(ours.peak_bytes, fsdp2.peak_bytes), limit_of(estimate)),
    )  # fmt: skip
    bound = Beside("", left_text(estimate))
    yield Figure("no schedule is below", time_text(estimate.whole_bound_us), (bound,))
    if (late := estimate.stragglers) is not None:
        whole_us = step_us + late.ours_us
        theirs = _theirs(whole_us, estimate.whole_fsdp2_us + late.fsdp2_us, time_text)
        yield Figure(f"step of {late.ranks:,} ranks that wait for the slowest",
                     time_text(whole_us), (theirs,))  # fmt: skip


def limit_of(estimate: Estimate) -> Beside:
    """What the peak may be at most: a budget only if one was set."""
    name = "budget" if estimate.limit is Limit.BUDGET else "limit: FSDP2's own peak,"
    return Beside(name, bytes_text(estimate.budget_bytes))


def _peak(ours: int, theirs: int) -> Beside:
    """Memory differs by bytes, everywhere: a share of it says nothing of what is left."""
    change = f"{'-' if ours < theirs else '+'}{bytes_text(abs(ours - theirs))}"
    return _beside("FSDP2", ours, theirs, bytes_text, change)


def _theirs(ours: float, theirs: float, text: Callable[[Any], str]) -> Beside:
    return _beside("FSDP2", ours, theirs, text, change_text(ours, theirs))


def _beside(
    name: str, ours: float, theirs: float, text: Callable[[Any], str], change: str
) -> Beside:
    if not change or ours == theirs:
        return Beside(name, text(theirs))
    return Beside(name, text(theirs), change, "better" if ours < theirs else "worse")


def _of_step(estimate: Estimate, measured: Measured | None) -> Iterator[Beside]:
    """The optimizer's part; and the rest as it was measured, which leaves the optimizer out."""
    if estimate.optimizer is not None:
        yield Beside("of it optimizer", took_text(estimate))
    if measured is None:
        return
    own_us, seen_us = estimate.step_time_us, measured.step_time_us
    change, way = change_text(seen_us, own_us), "worse" if seen_us > own_us else "better"
    seen = time_text(seen_us)
    if estimate.optimizer is None:
        yield Beside("measured", seen, change, way)
    else:
        both = f"{seen}, predicted {time_text(own_us)}"
        yield Beside("measured without it", both, change, way)


def _counts(sheet: Sheet) -> Iterator[Figure]:
    plan = sheet.plan
    step = "per step" if plan.backward is not None else "per forward"
    gathers = sum(s.num_all_gathers for s in plan.schedules)
    reductions = sum(s.num_reduce_scatters for s in plan.schedules)
    yield Figure("groups", f"{len(plan.groups):,}")
    yield Figure(f"all-gathers {step}", f"{gathers:,}")
    yield Figure(f"reduce-scatters {step}", f"{reductions:,}")
    if all_reduces := sum(s.num_all_reduces for s in plan.schedules):
        yield Figure(f"all-reduces {step}", f"{all_reduces:,}")
    yield Figure("gathered parameters, peak", bytes_text(plan.gathered_peak_bytes()))
