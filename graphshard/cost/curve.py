"""How long an amount of work takes: one shape for wire bytes, memory bytes and flops.

A curve is a constant plus one rate per size class, charged like income tax: the part of the
amount that falls into a class is charged at that class's rate. So a curve is continuous, and more
work is never cheaper, whatever was measured. With one class it is the alpha-beta model
(R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994):
time = alpha + amount / rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median

from graphshard.cost.algebra import Quantity, part_between


class Trust(StrEnum):
    """Where a number comes from, most trusted first."""

    MEASURED = "measured"  # in this job
    CALIBRATED = "calibrated"  # by `graphshard calibrate`
    PRESET = "preset"  # from data sheets


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Work between the previous class's `upto` and this one's costs `us_per_unit` a unit."""

    upto: float
    us_per_unit: Quantity


@dataclass(frozen=True, slots=True)
class Curve:
    """`base_us` for any amount above zero, plus each class's share. The last class is open."""

    base_us: Quantity
    classes: tuple[SizeClass, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless the classes are in order and the last one is open."""
        bounds = [c.upto for c in self.classes]
        ordered = all(a < b for a, b in pairwise(bounds))
        if not bounds or not ordered or not math.isinf(bounds[-1]):
            raise ValueError(f"size classes must rise and end with an open one, got {bounds}")


def line(base_us: Quantity, units_per_us: Quantity) -> Curve:
    """The alpha-beta model: one rate for every size."""
    return Curve(base_us, (SizeClass(math.inf, 1 / units_per_us),))


def curve_us(curve: Curve, amount: Quantity, starts: int = 1) -> Quantity:
    """starts * base_us + sum over the classes of (part of `amount` in the class) * us_per_unit."""
    rates = (part_between(amount, low, c.upto) * c.us_per_unit for low, c in _ranges(curve))
    return starts * curve.base_us + sum(rates)


def scaled(curve: Curve, base: Quantity, rate: Quantity) -> Curve:
    """The same curve with its constant times `base` and every rate (unit per us) times `rate`."""
    classes = tuple(replace(c, us_per_unit=c.us_per_unit / rate) for c in curve.classes)
    return Curve(curve.base_us * base, classes)


def through(curve: Curve, amount: float, us: float) -> Curve:
    """The same curve at another rate: `amount` takes `us`, or its launch and half of `us` if that
    is more."""
    base_us = float(curve.base_us)
    work_us = float(curve_us(curve, amount)) - base_us
    return scaled(curve, 1, work_us / max(us - base_us, us / 2))


@dataclass(frozen=True, slots=True)
class Sample:
    """`amount` of work (bytes or flops) took `us` microseconds."""

    amount: float
    us: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve with the samples that it was fitted to (by `graphshard.calibrate.fit`)."""

    curve: Curve
    samples: tuple[Sample, ...]

    @property
    def residuals(self) -> tuple[float, ...]:
        """Relative error of the curve at each sample: (predicted - measured) / measured."""
        return tuple(float(curve_us(self.curve, s.amount)) / s.us - 1.0 for s in self.samples)

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors; the fit has samples."""
        return median(map(abs, self.residuals))

    @property
    def worst_error(self) -> float:
        """Largest absolute relative error; the fit has samples."""
        return max(map(abs, self.residuals))


def _ranges(curve: Curve) -> Iterator[tuple[float, SizeClass]]:
    low = 0.0
    for size_class in curve.classes:
        yield low, size_class
        low = size_class.upto
