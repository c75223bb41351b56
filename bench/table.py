"""Numbers of all launches to one table: medians, and ratios between modes with an interval.

In: what each launch of each mode measured, and the budgets. Out: rows, and the table as text. Each
mode of graphshard is compared with the best tuned peer that fits its memory. Ratios are paired:
the baseline's step over the mode's step in the same round of launches, so that what the machine did
to a round stays out of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.interval import Interval, sign_interval
from bench.launch import Measured, Rate
from bench.modes import NO_LIMIT_BYTES, Mode


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one rate. Times are medians over launches of medians over steps.

    predicted_*: by the planner, 0 if it did not plan; without the optimizer. budget_bytes: 0 if the
    mode has none. against: the baseline. speedup: the baseline's step over this mode's.
    """

    mode: str
    title: str
    gbit: float
    step_us: float
    exposed_us: float
    busy_us: float
    lane_us: float
    predicted_us: float
    link_bytes: int
    gathered_peak_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int
    against: str = ""
    speedup: Interval | None = None


Rounds = Sequence[Mapping[str, Measured]]  # each: mode name -> what it measured


def make_rows(
    modes: Sequence[Mode], gbits: Sequence[float], rounds: Rounds, limits: Mapping[str, int | None]
) -> list[Row]:
    found = []
    for rate, gbit in enumerate(gbits):
        rows = {
            mode.name: make_row(mode, gbit, [r[mode.name].rates[rate] for r in rounds], limits)
            for mode in modes
        }
        peers = [rows[mode.name] for mode in modes if mode.is_peer]
        for mode in modes:
            row = rows[mode.name]
            found.append(compare(row, peers, rounds, rate) if mode.is_ours and peers else row)
    return found


def make_row(
    mode: Mode, gbit: float, launches: Sequence[Rate], limits: Mapping[str, int | None]
) -> Row:
    def typical(name: str) -> float:
        return median(step_median(rate, name) for rate in launches)

    return Row(
        mode=mode.name,
        title=mode.title,
        gbit=gbit,
        step_us=typical("step_us"),
        exposed_us=typical("exposed_us"),
        busy_us=median(busy_median(rate) for rate in launches),
        lane_us=typical("lane_us"),
        predicted_us=median(rate.predicted_us for rate in launches),
        link_bytes=int(typical("link_bytes")),
        gathered_peak_bytes=max(rate.gathered_peak_bytes for rate in launches),
        peak_bytes=max(rate.peak_bytes for rate in launches),
        predicted_peak_bytes=max(rate.predicted_peak_bytes for rate in launches),
        budget_bytes=limits[mode.name] or 0,
    )


def compare(row: Row, peers: Sequence[Row], rounds: Rounds, rate: int) -> Row:
    """With the fastest of `peers` whose peak is within the row's budget (without one, its peak).

    If none is, with the one whose peak is lowest.
    """
    limit = row.budget_bytes or row.peak_bytes
    lowest = min(peers, key=lambda t: t.peak_bytes)
    fitting = [t for t in peers if t.peak_bytes <= limit] or [lowest]
    best = min(fitting, key=lambda t: t.step_us)
    ratios = [
        step_median(r[best.mode].rates[rate], "step_us")
        / step_median(r[row.mode].rates[rate], "step_us")
        for r in rounds
    ]
    return replace(row, against=best.mode, speedup=sign_interval(ratios))


def step_median(rate: Rate, name: str) -> float:
    return float(median(getattr(times, name) for times in rate.steps))


def busy_median(rate: Rate) -> float:
    return median(times.step_us - times.exposed_us for times in rate.steps)


HEADER = (
    f"{'gbit':>5} {'mode':<28}{'step ms':>8}{'exposed':>8}{'busy':>7}{'lanes':>7}{'plan':>7}"
    f"{'link MB':>8}{'gathered':>9}{'peak':>7}{'plan':>7}{'budget':>8}  speed-up"
)


def render(rows: Sequence[Row]) -> str:
    """The table. MB are 1e6 bytes."""
    lines = [HEADER]
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and before.gbit != row.gbit:
            lines.append("")
        lines.append(line_of(row))
    intervals = [row.speedup for row in rows if row.speedup is not None]
    if intervals:
        lines += ["", FOOTER.format(coverage=100 * intervals[0].coverage)]
    return "\n".join(lines)


def line_of(row: Row) -> str:
    times = (row.step_us, row.exposed_us, row.busy_us, row.lane_us, row.predicted_us)
    step, exposed, busy, lanes, planned = (amount(us, 1e3) for us in times)
    sizes = (row.peak_bytes, row.predicted_peak_bytes, row.budget_bytes)
    peak, planned_peak, budget = (amount(size, 1e6) for size in sizes)
    link, gathered = amount(row.link_bytes, 1e6), amount(row.gathered_peak_bytes, 1e6)
    speedup, against = row.speedup, ""
    if speedup is not None:
        interval = f"[{speedup.low:.3f}, {speedup.high:.3f}]"
        against = f"{speedup.median:.3f} {interval} over {row.against}"
    return (
        f"{row.gbit:>5g} {row.title:<28}{step:>8}{exposed:>8}{busy:>7}{lanes:>7}{planned:>7}"
        f"{link:>8}{gathered:>9}{peak:>7}{planned_peak:>7}{budget:>8}  {against}"
    ).rstrip()


def amount(value: float, unit: float) -> str:
    """Nothing for 0, and for what stands for no limit."""
    return f"{value / unit:.1f}" if 0 < value < NO_LIMIT_BYTES else ""


FOOTER = (
    "exposed: compute waits; busy: the rest of the step; lanes: sum of the collectives' times;\n"
    "plan: predicted step (without optimizer) and peak; link: bytes that a rank sends, MB;\n"
    "gathered: parameters at peak; peak: all tensors, MB. speed-up: over the fastest tuned peer\n"
    "within the budget; median of paired ratios [order statistics, sign-based, {coverage:.1f} %]."
)
