"""A cost profile as plain text: what was measured, the fit, and how far the fit is off."""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.cost.comm import RankGroup
from graphshard.cost.curve import Curve, Fit
from graphshard.cost.profile import CostProfile

# Name, base, rate by size class, errors.
ROW = "{:<38}{:>10}  {:<26}{:>8}{:>8}"


def profile_lines(profile: CostProfile) -> str:
    """One row per fit. Rates are GB/s (bus bandwidth; bytes read and written) or Gflop/s.

    Rates of several size classes go from small to large. The errors are the median and the
    largest distance of the samples from the fit.
    """
    origin = profile.origin
    lines = [
        f"{origin.device} on {origin.host}, {origin.world_size} ranks, {origin.backend}, "
        f"{origin.threads} threads, torch {origin.torch_version}, {origin.date}",
        "",
        ROW.format("", "base us", "rate by size class", "median", "worst"),
        *_rows(profile),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rows(profile: CostProfile) -> Iterator[str]:
    for comm in profile.comm:
        yield _row(f"{comm.kind} {_group_text(comm.group)}", comm.fit, "GB/s")
    for dtype, fit in profile.arithmetic:
        yield _row(f"matrix product {dtype}", fit, "Gflop/s")
    for dtype, fit in profile.attention:
        yield _row(f"attention {dtype}", fit, "Gflop/s")
    yield _row("pointwise op", profile.memory, "GB/s")
    if profile.host is not None:
        yield _row("copy to the host or back", profile.host, "GB/s")


def _row(name: str, fit: Fit, unit: str) -> str:
    rates = f"{_rates(fit.curve)} {unit}"
    found = (fit.median_error, fit.worst_error) if fit.samples else ()
    errors = [f"{error:.0%}" for error in found] or ["-", "-"]
    return ROW.format(name, f"{fit.curve.base_us:,.1f}", rates, *errors)


def _rates(curve: Curve) -> str:
    """A unit a nanosecond is a giga-unit a second. "-": in this class only the base costs."""
    return ", ".join(_rate(float(c.us_per_unit)) for c in curve.classes)


def _rate(us_per_unit: float) -> str:
    if us_per_unit == 0:
        return "-"
    rate = 1 / us_per_unit / 1e3
    return f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}"


def _group_text(group: RankGroup) -> str:
    if group.nodes == 1:
        return f"{group.name}, {group.ranks} ranks"
    return f"{group.name}, {group.nodes} x {group.ranks_per_node} ranks"
