"""Is it worth it, what limits it, what is left: the first sentences of a page.

In comes a plan, and what was measured of it; out comes a `Standing` of numbers, or its sentences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Direction, Estimate, Lane, Plan
from graphshard.view.misses import Miss
from graphshard.view.text import LANE_WORDS, bytes_text
from graphshard.view.units import share_text, time_text

# A smaller share of the step is not what limits it.
NOTICEABLE = 0.01
# So much of the limit that is left over is worth a word.
SPARE = 0.02


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What compute waits for most: collectives of one kind in one direction, and how long."""

    lane: Lane
    direction: Direction
    exposed_us: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a whole step. limit: None if waits are too short to matter. most_us: no schedule of this
    graph gains more, whatever its memory. spare_bytes: of the limit, not needed; 0: none to speak
    of."""

    step_us: float
    fsdp2_us: float
    more_bytes: int
    limit: Bottleneck | None
    most_us: float
    peak_bytes: int
    limit_bytes: int
    spare_bytes: int

    @property
    def ratio(self) -> float:
        return self.fsdp2_us / self.step_us if self.step_us else 1.0


def standing_of(plan: Plan) -> Standing:
    estimate = plan.estimate
    spare_bytes = estimate.budget_bytes - estimate.peak_bytes
    return Standing(
        estimate.whole_step_us,
        estimate.whole_fsdp2_us,
        estimate.peak_bytes - estimate.fsdp2.peak_bytes,
        _limit(plan, estimate),
        max(estimate.whole_step_us - estimate.whole_bound_us, 0.0),
        estimate.peak_bytes,
        estimate.budget_bytes,
        spare_bytes if spare_bytes > SPARE * estimate.budget_bytes else 0,
    )


def _limit(plan: Plan, estimate: Estimate) -> Bottleneck | None:
    waits: dict[tuple[Lane, Direction], float] = defaultdict(float)
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=False):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            waits[step.lane, schedule.direction] += time.exposed_us
    if not waits:
        return None
    (lane, direction), exposed_us = max(waits.items(), key=lambda pair: pair[1])
    if exposed_us < NOTICEABLE * estimate.step_time_us:
        return None
    return Bottleneck(lane, direction, exposed_us)


def answer_sentences(
    plan: Plan, measured: Measured | None = None, missed: Sequence[Miss] = ()
) -> list[str]:
    """The most telling first; none for a plan without forecasts. missed: `misses` of what was
    measured."""
    if not plan.forecasts:
        return []
    standing = standing_of(plan)
    return [
        f"{_speed(standing)} {_memory(standing)}.",
        f"{_limited(standing, plan)}.",
        f"{_left(standing)}.",
        *_measured(plan.estimate, measured, missed),
    ]


def _speed(standing: Standing) -> str:
    if abs(standing.ratio - 1) < 0.0005:
        return "As fast as FSDP2"
    if standing.ratio < 1:
        return f"{1 / standing.ratio:.3g} x slower than FSDP2"
    if standing.ratio < 1.1:
        return f"{share_text(standing.ratio - 1, 1.0)} faster than FSDP2"
    return f"{standing.ratio:.2f} x faster than FSDP2"


def _memory(standing: Standing) -> str:
    if standing.more_bytes == 0:
        return "at the same peak of memory"
    if standing.more_bytes < 0:
        return f"with {bytes_text(-standing.more_bytes)} less memory"
    return f"for {bytes_text(standing.more_bytes)} more memory"


def _limited(standing: Standing, plan: Plan) -> str:
    limit = standing.limit
    if limit is None:
        exposed = share_text(sum(f.exposed_us for f in plan.forecasts), standing.step_us)
        return f"Limited by its own compute, which waits for {exposed} of the step"
    kind = LANE_WORDS[limit.lane]
    share = share_text(limit.exposed_us, standing.step_us)
    return (
        f"Limited by the {kind}s in {limit.direction}: compute waits for them "
        f"{time_text(limit.exposed_us)} ({share} of the step)"
    )


def _left(standing: Standing) -> str:
    left = share_text(standing.most_us, standing.step_us)
    if standing.most_us < 0.0005 * standing.step_us:
        text = "No schedule of this graph is faster"
    else:
        text = f"At most {left} left to gain, whatever the memory"
    if standing.spare_bytes:
        enough = bytes_text(standing.peak_bytes)
        text += f"; {enough} would be enough, of {bytes_text(standing.limit_bytes)}"
    return text


def _measured(
    estimate: Estimate, measured: Measured | None, missed: Sequence[Miss]
) -> Iterator[str]:
    if measured is None or not estimate.step_time_us:
        return
    ratio = measured.step_time_us / estimate.step_time_us
    way = "slower" if ratio >= 1 else "faster"
    text = (
        f"Measured, forward and backward took {time_text(measured.step_time_us)}: "
        f"{max(ratio, 1 / ratio):.2f} x {way} than predicted"
    )
    largest = f"; the largest part: {missed[0].name}, {missed[0].change}" if missed else ""
    yield f"{text}{largest}."
