"""From measured samples to a curve.

In: (amount, microseconds) samples, one per size, each already a median over repetitions. Out: a
curve with non-negative constant and rates, and how far each sample is from it. Relative errors
count, so that a small message weighs as much as a large one. A size class is split only where
that makes the fit clearly better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, combinations, pairwise
from statistics import fmean

import torch
from torch import Tensor

from graphshard.cost.curve import Curve, Fit, Sample, SizeClass

MAX_CLASSES = 3
# A class more has to bring the mean relative error down by this factor ...
PRICE_OF_A_CLASS = 1.5
# ... and nothing is gained below this error, which repeated runs do not reproduce.
GOOD_ENOUGH = 0.03
# Residuals beyond this many median residuals are outliers and lose weight (P. J. Huber, "Robust
# estimation of a location parameter", 1964).
OUTLIER = 2.0
REWEIGHTINGS = 5


def fit_curve(samples: Iterable[Sample], max_classes: int = MAX_CLASSES) -> Fit:
    """The curve with as few size classes as describe the samples.

    Raises ValueError without samples of two different positive amounts and positive times.
    """
    ordered = tuple(sorted(samples, key=lambda s: (s.amount, s.us)))
    amounts = sorted({s.amount for s in ordered})
    if len(amounts) < 2 or amounts[0] <= 0 or any(s.us <= 0 for s in ordered):
        raise ValueError("a fit needs samples of two different sizes, with times above zero")
    cuts = chain.from_iterable(_cuts(amounts, count) for count in range(max_classes))
    return min((_fit_classes(ordered, c) for c in cuts), key=_score)


def _score(fit: Fit) -> float:
    error = fmean(map(abs, fit.residuals))
    return max(error, GOOD_ENOUGH) * PRICE_OF_A_CLASS ** len(fit.curve.classes)


def _cuts(amounts: Sequence[float], count: int) -> Iterable[tuple[float, ...]]:
    """Class bounds at sample sizes, two sizes at least in every class: one would be a guess."""
    for places in combinations(range(1, len(amounts) - 2), count):
        if all(b - a >= 2 for a, b in pairwise(places)):
            yield tuple(amounts[p] for p in places)


def _fit_classes(samples: tuple[Sample, ...], cuts: tuple[float, ...]) -> Fit:
    """Least squares of relative errors, outliers weighted down, coefficients not negative."""
    bounds = (0.0, *cuts, math.inf)
    # A column for the constant, then one per class: the part of the amount that falls into it.
    rows = [[1.0, *(_part(s.amount, *ends) for ends in pairwise(bounds))] for s in samples]
    relative = torch.tensor(rows, dtype=torch.float64) / _column(s.us for s in samples)
    weights = [1.0] * len(samples)
    for _ in range(REWEIGHTINGS):
        base_us, *rates = _nonnegative_least_squares(relative, _column(weights).sqrt())
        classes = tuple(map(SizeClass, bounds[1:], rates))
        fit = Fit(Curve(base_us, classes), samples)
        limit = OUTLIER * max(fit.median_error, 1e-9)
        weights = [limit / max(abs(r), limit) for r in fit.residuals]
    return fit


def _part(amount: float, low: float, high: float) -> float:
    return max(min(amount, high) - low, 0.0)


def _column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)[:, None]


def _nonnegative_least_squares(rows: Tensor, weights: Tensor) -> list[float]:
    """Coefficients c >= 0 for which rows @ c is nearest to ones.

    There are at most 1 + MAX_CLASSES unknowns, so every choice of those that stay zero is tried.
    """
    size = rows.abs().amax(0)  # columns differ by ten orders of magnitude: 1 and bytes
    rows = rows / size * weights
    best = torch.zeros_like(size)
    for active in _subsets(rows.shape[1]):
        trial = torch.zeros_like(size)
        trial[active] = torch.linalg.lstsq(rows[:, active], weights).solution.squeeze(1)
        if trial.min() >= 0 and _error(rows, trial, weights) < _error(rows, best, weights):
            best = trial
    return [float(c) for c in best / size]


def _error(rows: Tensor, coefficients: Tensor, weights: Tensor) -> float:
    return float((rows @ coefficients[:, None] - weights).norm())


def _subsets(count: int) -> Iterable[list[int]]:
    sizes = range(count, 0, -1)
    return map(list, chain.from_iterable(combinations(range(count), n) for n in sizes))
