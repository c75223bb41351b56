"""Ratios of paired launches: a median, an interval around it, and whether a target is met.

In: one number per round of launches. Out: `Interval`, whose coverage holds for any distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEVEL = 0.95
SLACK = 0.02  # a target counts as met if the interval's near end is within this part of it


@dataclass(frozen=True, slots=True)
class Interval:
    """`coverage`: probability that it holds the true median, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio that should be at most `target`. None: there was nothing to divide by."""

    ours: str
    peer: str
    target: float
    ratio: Interval | None

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio.low <= self.target * (1 + SLACK)


def sign_interval(values: Sequence[float]) -> Interval:
    """Order statistics around the median: the narrowest symmetric pair that covers LEVEL.

    The k-th smallest and k-th largest of n values cover the true median with probability
    1 - 2 P(B < k), B binomial (n, 1/2), which is the inverted sign test (any textbook of
    nonparametric statistics). With fewer than 6 values even the extremes cover less than 0.95;
    the interval then is theirs, and `coverage` says so.
    """
    ordered, n = sorted(values), len(values)
    outside = 0.0
    chosen, coverage = 1, 1 - 2 * 0.5**n
    for k in range(1, n // 2 + 1):
        outside += math.comb(n, k - 1) * 0.5**n
        if 1 - 2 * outside < LEVEL:
            break
        chosen, coverage = k, 1 - 2 * outside
    return Interval(median(ordered), ordered[chosen - 1], ordered[-chosen], coverage)


def compare(
    ours: str, peer: str, target: float, pairs: Sequence[tuple[float, float]]
) -> Comparison:
    """pairs: (ours, the peer's) of each round.

    No ratio if there are no pairs, or if a peer's number is 0 or below, where "at most `target` of
    it" says nothing.
    """
    if not pairs or any(theirs <= 0 for _, theirs in pairs):
        return Comparison(ours, peer, target, None)
    return Comparison(ours, peer, target, sign_interval([mine / theirs for mine, theirs in pairs]))


def verdict(comparison: Comparison) -> str:
    """For a table: the ratio with its interval, the target and whether it is met."""
    ratio = comparison.ratio
    if ratio is None:
        return f"{comparison.ours} / {comparison.peer}: no ratio"
    return (
        f"{comparison.ours} / {comparison.peer}: {ratio.median:.2f} "
        f"[{ratio.low:.2f}, {ratio.high:.2f}], target {comparison.target:.2f}: "
        f"{'met' if comparison.met else 'MISSED'}"
    )
