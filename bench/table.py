"""Numbers of all launches to one table: medians, and ratios between modes with an interval.

In: what each launch of each mode measured. Out: rows, and the table as text. Ratios are paired:
a mode's step over the subject's step in the same round of launches, so that what the machine did
to a round stays out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.launch import Measured
from bench.modes import SUBJECT, Mode

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """`coverage`: probability that it holds the true median, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one rate. Times are medians over launches of medians over steps.

    ratio: this mode's step over the subject's; None for the subject itself.
    """

    mode: str
    title: str
    gbit: float
    step_us: float
    exposed_us: float
    busy_us: float
    lane_us: float
    link_bytes: int
    gathered_peak_bytes: int
    peak_bytes: int
    ratio: Interval | None


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


def make_rows(
    modes: Sequence[Mode], gbits: Sequence[float], rounds: Sequence[dict[str, Measured]]
) -> list[Row]:
    """rounds: for each round of launches, mode name -> what it measured."""
    return [
        make_row(mode, gbit, [r[mode.name] for r in rounds], [r.get(SUBJECT) for r in rounds], i)
        for i, gbit in enumerate(gbits)
        for mode in modes
    ]


def make_row(
    mode: Mode,
    gbit: float,
    launches: Sequence[Measured],
    subject: Sequence[Measured | None],
    rate: int,
) -> Row:
    def typical(name: str) -> float:
        return median(step_median(m, rate, name) for m in launches)

    ratios = [
        step_median(m, rate, "step_us") / step_median(s, rate, "step_us")
        for m, s in zip(launches, subject, strict=True)
        if s is not None
    ]
    step_us, exposed_us = typical("step_us"), typical("exposed_us")
    return Row(
        mode=mode.name,
        title=mode.title,
        gbit=gbit,
        step_us=step_us,
        exposed_us=exposed_us,
        busy_us=median(busy_median(m, rate) for m in launches),
        lane_us=typical("lane_us"),
        link_bytes=int(typical("link_bytes")),
        gathered_peak_bytes=max(m.gathered_peak_bytes for m in launches),
        peak_bytes=max(m.resident_bytes + m.step_peak_bytes for m in launches),
        ratio=None if mode.name == SUBJECT or not ratios else sign_interval(ratios),
    )


def step_median(measured: Measured, rate: int, name: str) -> float:
    return float(median(getattr(times, name) for times in measured.rates[rate]))


def busy_median(measured: Measured, rate: int) -> float:
    return median(times.step_us - times.exposed_us for times in measured.rates[rate])


HEADER = (
    f"{'gbit':>5} {'mode':<24}{'step ms':>9}{'exposed':>9}{'busy':>8}{'lanes':>8}"
    f"{'link MB':>9}{'gathered MB':>13}{'peak MB':>9}  step / {SUBJECT}"
)


def render(rows: Sequence[Row]) -> str:
    """The table. MB are 1e6 bytes."""
    lines = [HEADER]
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and before.gbit != row.gbit:
            lines.append("")
        ratio = row.ratio
        against = "" if ratio is None else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        times = (row.step_us, row.exposed_us, row.busy_us, row.lane_us)
        step, exposed, busy, lanes = (us / 1e3 for us in times)
        link, gathered, peak = (
            b / 1e6 for b in (row.link_bytes, row.gathered_peak_bytes, row.peak_bytes)
        )
        lines.append(
            f"{row.gbit:>5g} {row.title:<24}{step:>9.1f}{exposed:>9.1f}{busy:>8.1f}{lanes:>8.1f}"
            f"{link:>9.1f}{gathered:>13.2f}{peak:>9.1f}  {against}".rstrip()
        )
    coverage = next((row.ratio.coverage for row in rows if row.ratio is not None), None)
    if coverage is not None:
        lines += ["", FOOTER.format(coverage=100 * coverage)]
    return "\n".join(lines)


FOOTER = (
    "exposed: compute waits; busy: the rest of the step; lanes: sum of the collectives' times;\n"
    "link: bytes that a rank sends; gathered: parameters at peak; peak: all tensors at peak.\n"
    "ratio: median of the rounds' paired ratios [order statistics, sign-based, {coverage:.1f} %]."
)
