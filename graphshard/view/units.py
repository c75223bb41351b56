"""Words for times, rates and shares.

Only views convert: everywhere else times are microseconds and sizes bytes.
"""

from __future__ import annotations

SCALES = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))


def time_text(us: float) -> str:
    """`us` microseconds with three digits: "7.61 s", "12.3 ms", "840 us", "0 us"."""
    if round(abs(us), 3) == 0:
        return "0 us"
    scale, unit = next((s for s in SCALES if abs(us) >= s[0] * 0.9995), SCALES[-1])
    value = us / scale
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def rate_text(num_bytes: float, us: float) -> str:
    """Bytes per time in decimal units, as networks are sold: "212 GB/s"."""
    bytes_per_us = num_bytes / us
    return f"{bytes_per_us / 1e3:,.3g} GB/s" if bytes_per_us >= 1 else f"{bytes_per_us:,.3g} MB/s"


def share_text(part: float, whole: float) -> str:
    """ "22.6 %"."""
    return f"{part / whole if whole else 0.0:.1%}".replace("%", " %")


def change_text(now: float, before: float) -> str:
    """How far `now` is from `before`: "-14.7 %"; nothing where there was nothing before."""
    return f"{(now - before) / before:+.1%}".replace("%", " %") if before else ""
