"""One direction of a priced problem in regions: their times, and what is alive in them.

In: the costs of each op. Out: `Divided`. Regions start where a group is needed, released or
reduced, and inside long ones, so that a gather can start there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import inf

from graphshard.planner.problem import Category, Group, Region
from graphshard.pricing.op_costs import OpCosts
from graphshard.pricing.usage import Usage
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import GroupInfo

# A long stretch of compute is cut into so many regions.
CUTS = 8


@dataclass(frozen=True, slots=True)
class Divided:
    """One direction in regions. starts: the first op of each region, then the number of ops.

    alive_bytes: of inputs and of what ops make, during each op; gradients are not among them.
    """

    usage: Usage
    starts: tuple[int, ...]
    regions: tuple[Region, ...]
    alive_bytes: tuple[int, ...]

    def region_of(self, op: int) -> int:
        """The region of compute op `op`; -1 for -1 (before the first op)."""
        return bisect_right(self.starts[:-1], op) - 1


def divided(op_costs: OpCosts, splittable: Container[int]) -> Divided:
    """splittable: groups that may travel in parts."""
    ends = op_costs.ends_us
    starts = _starts(op_costs.usage, ends, splittable)
    alive_bytes = tuple(one.inputs + one.made for one in op_costs.live)
    regions = tuple(
        Region(
            us=ends[stop] - ends[start],
            activation_bytes=max(alive_bytes[start:stop]),
            num_ops=stop - start,
        )
        for start, stop in pairwise(starts)
    )
    return Divided(op_costs.usage, starts, regions, alive_bytes)


def _starts(usage: Usage, ends: Sequence[float], splittable: Container[int]) -> tuple[int, ...]:
    """Where regions start: where a group is needed, released or reduced, and inside long ones.

    Where a group may be split, also where each of its parameters is needed. Compiled code is cut
    nowhere else than its usage says.
    """
    if usage.regions:
        return usage.regions
    needed = {u.first for u in usage.params if u.group in splittable}
    cuts = sorted({*usage.cuts, *needed})
    longest_us = ends[-1] / (CUTS * max(1, len(usage.uses)))
    found = []
    for start, stop in pairwise(cuts):
        found.append(start)
        for op in range(start + 1, stop):
            if ends[op] - ends[found[-1]] >= longest_us:
                found.append(op)
    return (*found, usage.num_ops)


def with_late_gradients(
    backward: Divided, infos: Sequence[GroupInfo], groups: Sequence[Group]
) -> tuple[Region, ...]:
    """The regions of `backward`, each with what is not there when it needs most.

    All gradients of a part are counted from the region on that makes the first of them; while it
    runs, some are still to come.
    """
    made = {(r.group, place): op for r in backward.usage.reductions for place, op in r.made}
    coming: dict[int, list[_Coming]] = {}
    order = count()
    for group in groups:
        for part in group.parts:
            if part.gradient is None:
                continue
            for place in part.params:
                param, op = infos[group.id].params[place], made.get((group.id, place))
                if param.trainable and op is not None:
                    grad = Allocation(Category.UNSHARDED_GRAD, param.grad_bytes, group.id)
                    own = coming.setdefault(part.gradient.first, [])
                    own.append(_Coming(op, next(order), grad))
    late: list[_Coming] = []
    found = []
    for index, (region, (start, stop)) in enumerate(
        zip(backward.regions, pairwise(backward.starts), strict=True)
    ):
        late = [one for one in (*late, *coming.get(index, ())) if one.op > start]
        late.sort(key=lambda one: one.order)
        found.append(_at_its_fullest(region, backward.alive_bytes, start, stop, late))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A gradient that is counted, the op that makes it, and its place among all of them."""

    op: int
    order: int
    grad: Allocation


def _at_its_fullest(
    region: Region, alive_bytes: Sequence[int], start: int, stop: int, late: Sequence[_Coming]
) -> Region:
    """late: gradients that are counted, and are made after op `start`. Between two ops that make
    some, the same ones are missing."""
    cuts = [start, *sorted({one.op for one in late if one.op < stop}), stop]
    most_bytes, fullest = -inf, start
    for begin, end in pairwise(cuts):
        alive = max(alive_bytes[begin:end])
        own_bytes = alive - sum(one.grad.bytes for one in late if one.op >= end)
        if own_bytes > most_bytes:
            most_bytes, fullest = own_bytes, alive_bytes.index(alive, begin, end)
    return replace(
        region,
        idle_bytes=region.activation_bytes - alive_bytes[fullest],
        absent=tuple(one.grad for one in late if one.op > fullest),
    )
