"""Is it worth it, what limits it, what is left, what did it take: the first sentences of a page.

In comes a plan, and what was measured of it; out comes a `Standing` of numbers, or its sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate, Plan
from graphshard.view.brief import ALIKE, Rest, enough_text, gain_text, left_text, left_us, rest_of
from graphshard.view.courses import drawn_us, shows_all
from graphshard.view.misses import Miss
from graphshard.view.text import bytes_text
from graphshard.view.units import share_text, time_text
from graphshard.view.waits import Waited, kind_text, waited

# A smaller share of the step is not what limits it.
NOTICEABLE = 0.01
NOT_MEASURED = "Not measured yet: all figures are predicted"


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a whole step. limits: what compute waits for noticeably, the longest first; empty if waits
    are too short to matter. most_us: no schedule of this graph gains more, whatever its memory.
    rest: of the limit, what is not needed; None: nothing to speak of."""

    step_us: float
    fsdp2_us: float
    more_bytes: int
    limits: tuple[Waited, ...]
    most_us: float
    rest: Rest | None


def standing_of(plan: Plan) -> Standing:
    estimate = plan.estimate
    return Standing(
        estimate.whole_step_us,
        estimate.whole_fsdp2_us,
        estimate.peak_bytes - estimate.fsdp2.peak_bytes,
        tuple(one for one in waited(plan) if one.us >= NOTICEABLE * drawn_us(plan)),
        left_us(estimate),
        rest_of(estimate),
    )


def answer_sentences(
    plan: Plan, measured: Measured | None = None, missed: Sequence[Miss] = ()
) -> list[str]:
    """The most telling first; none for a plan without forecasts. missed: `misses` of what was
    measured."""
    if not plan.forecasts:
        return []
    standing = standing_of(plan)
    return [
        f"The step takes {gain_text(plan.estimate)}{_memory(standing)}.",
        f"{_limited(standing, plan)}.",
        f"{_left(plan.estimate)}.",
        f"{_measured(plan.estimate, measured, missed)}.",
    ]


def _memory(standing: Standing) -> str:
    if standing.more_bytes == 0:
        return ", at the same peak of memory"
    if standing.more_bytes < 0:
        return f", with {bytes_text(-standing.more_bytes)} less memory"
    return f", for {bytes_text(standing.more_bytes)} more memory"


def _limited(standing: Standing, plan: Plan) -> str:
    """All waits together; the longest single ones have a list of their own on the page."""
    exposed_us, whole_us = sum(f.exposed_us for f in plan.forecasts), drawn_us(plan)
    share = share_text(exposed_us, whole_us)
    of = "the step" if shows_all(plan) else "a micro-step"
    if not standing.limits:
        return f"Limited by compute: it waits for communication in {share} of {of}"
    parts = ", ".join(f"{time_text(one.us)} for {kind_text(one)}" for one in standing.limits)
    waits = f"in all, compute waits {time_text(exposed_us)} ({share} of {of})"
    return f"Limited by communication: {waits}, of it {parts}"


def _left(estimate: Estimate) -> str:
    if left_us(estimate) <= ALIKE * estimate.whole_step_us:
        text = "No schedule of this graph is faster"
    else:
        text = f"{left_text(estimate).capitalize()}, whatever the memory"
    if enough := enough_text(estimate):
        text += f"; {bytes_text(estimate.peak_bytes)} would be enough: {enough}"
    return text


def _measured(estimate: Estimate, measured: Measured | None, missed: Sequence[Miss]) -> str:
    if measured is None or not estimate.step_time_us:
        return NOT_MEASURED
    seen_us = measured.step_time_us
    longer = longer_text(estimate.step_time_us, seen_us)
    text = f"Measured, forward and backward took {time_text(seen_us)}, {longer}"
    # Of a step that took longer, the part that did: another one may have been shorter by more.
    way = missed[-1].way if missed else ""
    largest = next((one for one in missed[:-1] if one.way == way), None)
    return f"{text}; the largest part: {largest.name}, {largest.change}" if largest else text


def longer_text(own_us: float, seen_us: float) -> str:
    """ "10.0 % more than the 1.06 s predicted"."""
    if abs(seen_us - own_us) <= ALIKE * own_us:
        return "as predicted"
    way = "less" if seen_us < own_us else "more"
    share = share_text(abs(seen_us - own_us), own_us)
    return f"{share} {way} than the {time_text(own_us)} predicted"
