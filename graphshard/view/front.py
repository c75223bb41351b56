"""Time of a step against its peak of memory, as an SVG that needs nothing else.

In: panels, each with series of spots. Out: the text of the file, panel beside panel. Equal panels
give equal pictures. Each panel has axes of its own, which begin where its spots do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from math import ceil, floor, log10

from graphshard.view.templates import template
from graphshard.view.units import SCALES

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 44, 48
LINE = 16  # of the legend
TICKS = 5  # at most about so many
# The first is the plan's. From Okabe and Ito, told apart without red and green.
COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


@dataclass(frozen=True, slots=True)
class Spot:
    peak_bytes: int
    step_us: float


@dataclass(frozen=True, slots=True)
class Series:
    """One of each panel's series is a line of its own colour; a single spot is only a mark."""

    name: str
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """time: what takes the time of a spot."""

    title: str
    series: tuple[Series, ...]
    time: str = "step"


@dataclass(frozen=True, slots=True)
class _Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    colour: str
    places: tuple[tuple[float, float], ...]
    legend_y: float


@dataclass(frozen=True, slots=True)
class _Drawn:
    title: str
    x: float
    y: float
    across: tuple[_Tick, ...]
    up: tuple[_Tick, ...]
    lines: tuple[_Line, ...]
    time: str


def front_svg(panels: Sequence[Panel], columns: int = 1) -> str:
    """Raises ValueError for a panel without spots."""
    legend = max(len(panel.series) for panel in panels)
    height = HEIGHT + LINE * legend
    drawn = [
        _drawn(panel, WIDTH * (n % columns), height * (n // columns))
        for n, panel in enumerate(panels)
    ]
    return template("front.svg.j2").render(
        panels=drawn,
        width=WIDTH * min(columns, len(panels)),
        height=height * -(-len(panels) // columns),
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=HEIGHT - BOTTOM,
    )


def _drawn(panel: Panel, x: float, y: float) -> _Drawn:
    spots = [spot for series in panel.series for spot in series.spots]
    if not spots:
        raise ValueError(f"{panel.title}: nothing to draw")
    peaks = _Scale.of([float(s.peak_bytes) for s in spots], LEFT, WIDTH - RIGHT)
    steps = _Scale.of([s.step_us for s in spots], HEIGHT - BOTTOM, TOP)
    lines = [
        _Line(
            series.name,
            COLOURS[number % len(COLOURS)],
            tuple((peaks.at(s.peak_bytes), steps.at(s.step_us)) for s in _in_order(series)),
            HEIGHT + LINE * number,
        )
        for number, series in enumerate(panel.series)
    ]
    return _Drawn(
        panel.title,
        x,
        y,
        tuple(_ticks(peaks, SIZES)),
        tuple(_ticks(steps, SCALES)),
        tuple(lines),
        panel.time,
    )


def _in_order(series: Series) -> list[Spot]:
    return sorted(series.spots, key=lambda spot: (spot.peak_bytes, spot.step_us))


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values from `least` to `most` lie from pixel `first` to pixel `last`."""

    least: float
    most: float
    first: float
    last: float

    @staticmethod
    def of(values: Sequence[float], first: float, last: float) -> _Scale:
        """With a little room at both ends."""
        room = 0.05 * (max(values) - min(values)) or 0.05 * max(values) or 1.0
        return _Scale(max(0.0, min(values) - room), max(values) + room, first, last)

    def at(self, value: float) -> float:
        share = (value - self.least) / (self.most - self.least)
        return round(self.first + share * (self.last - self.first), 1)


def _ticks(scale: _Scale, units: Sequence[tuple[float, str]]) -> Iterator[_Tick]:
    """At multiples of 1, 2 or 5 times a power of 10 of the unit."""
    unit, name = next((u for u in units if scale.most >= u[0]), units[-1])
    rough = (scale.most - scale.least) / unit / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if s >= rough)
    first = ceil(scale.least / unit / step)
    for value in takewhile(lambda v: v * unit <= scale.most, (step * n for n in count(first))):
        yield _Tick(scale.at(value * unit), f"{value:g} {name}")
