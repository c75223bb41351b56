"""Why backward computes some activations again and not others, or the host holds them, as facts.

In: the units that a placed program offers, and those that were chosen. Out: a reason for each group
of which something is computed again or offloaded, and the rate at which time was given for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from graphshard.pricing.recompute import RecomputeUnit, chosen_units
from graphshard.schedule.plan import GroupInfo, Recomputed
from graphshard.schedule.reasons import ExchangeRate, Offloading, Reason, Recomputation

GIB = 1024**3


def recompute_reasons(
    units: Sequence[RecomputeUnit], groups: Sequence[GroupInfo], chosen: Recomputed
) -> Iterator[Reason]:
    """groups: by their numbers, under the names that `chosen` has them by."""
    found = chosen_units(units, groups, chosen)
    again, away = found.again, found.offloaded
    left = [unit for unit in units if unit not in (*again, *away)]
    for group in dict.fromkeys(unit.group for unit in again):
        taken = [unit for unit in again if unit.group == group]
        yield Recomputation(
            group=group,
            again=tuple(unit.origin for unit in taken),
            saved=tuple(unit.origin for unit in left if unit.group == group),
            extra_us=sum(unit.extra_us for unit in taken),
            saved_bytes=sum(unit.saved_bytes for unit in taken),
        )
    for group in dict.fromkeys(unit.group for unit in away):
        own = [unit for unit in away if unit.group == group]
        yield Offloading(
            group, tuple(unit.origin for unit in own), sum(unit.held_bytes for unit in own)
        )
    if units:
        yield ExchangeRate(max(_rates(again), default=None), min(_rates(left), default=None))


def _rates(units: Iterable[RecomputeUnit]) -> Iterator[float]:
    """Microseconds for each GiB."""
    return (unit.extra_us / unit.saved_bytes * GIB for unit in units)
