"""Positions for all jobs of a stage within a memory budget.

For a given order of the gathers and given other contents of memory, `fill` is exact: before each
event it knows the largest number of gathers that may be in flight there and at every later event,
and it issues each gather as soon as that number allows. No placement in that order has an earlier
issue, so none is faster. Reductions are issued when ready and waited for as late as memory allows.
What gathers and reductions may take from each other is the `Policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

from graphshard.planner.stage import (
    REDUCE_ISSUE,
    REDUCE_WAIT,
    REDUCE_WAIT_LATE,
    Placement,
    Stage,
    next_gather_position,
)

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Policy:
    """gathers: at most so many in flight. reductions: buffers that gathers leave room for."""

    gathers: int = UNLIMITED
    reductions: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class View:
    """Memory of one stage with nothing in flight but what has to be.

    One entry per fixed event and reduction issue, in order. needs: bytes while the event runs,
    those that its own job has in flight included. waited, issued: gathers waited for up to and
    including the event; reductions issued before it. gathers, reductions: running sums of the
    jobs' flight bytes, from 0.
    """

    positions: tuple[int, ...]
    needs: tuple[int, ...]
    waited: tuple[int, ...]
    issued: tuple[int, ...]
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]


def view_of(stage: Stage, start_bytes: int) -> View:
    """`stage` as a `View`; start_bytes: what is in memory when it starts."""
    gather_of = {id(job.wait): job for job in stage.gathers}
    reduction_of = {id(job.issue): job for job in stage.reductions}
    ready = ((job.at, job.issue) for job in stage.reductions)
    events = sorted([*stage.fixed, *ready], key=itemgetter(0))
    held, waits, issues = start_bytes, 0, 0
    rows = []
    for position, event in events:
        own = 0
        grows = event.alloc_bytes - event.free_bytes
        before = issues
        if (gather := gather_of.get(id(event))) is not None:
            waits += 1
            own = gather.flight_bytes
            grows += gather.issue.alloc_bytes - gather.issue.free_bytes
        elif (reduction := reduction_of.get(id(event))) is not None:
            issues += 1
            grows -= reduction.flight_bytes
        needs = held + own + event.alloc_bytes + event.brief_bytes
        rows.append((position, needs, waits, before))
        held += grows
    positions, needed, waited, issued = zip(*rows, strict=True) if rows else ((),) * 4
    return View(
        positions,
        needed,
        waited,
        issued,
        gathers=_running(j.flight_bytes for j in stage.gathers),
        reductions=_running(j.flight_bytes for j in stage.reductions),
    )


def _running(amounts: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(amounts, initial=0))


def worst_of(views: Sequence[View]) -> View:
    """One view that needs at every event what any of `views` needs there."""
    return replace(
        views[0],
        needs=_most(v.needs for v in views),
        gathers=_most(v.gathers for v in views),
        reductions=_most(v.reductions for v in views),
    )


def _most(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*rows, strict=True)))


def fill(stage: Stage, view: View, budget_bytes: int, policy: Policy) -> Placement | None:
    """The placement that `policy` gives; None if no placement fits the budget."""
    if max(view.needs, default=0) > budget_bytes:
        return None
    most = _most_gathers(view, budget_bytes, policy)
    gathers: list[int] = []
    previous = -1
    for position, count in zip(view.positions, most, strict=True):
        if count > len(gathers):
            at = next_gather_position(stage, previous)
            gathers.extend([at] * (count - len(gathers)))
        previous = position
    return Placement(
        tuple(gathers),
        tuple(job.at for job in stage.reductions),
        _latest_waits(stage, view, most, budget_bytes),
    )


def _most_gathers(view: View, budget_bytes: int, policy: Policy) -> list[int]:
    """For each event, how many gathers may have been issued before it."""
    sums, ahead = view.gathers, policy.gathers
    most, limit = [], len(sums) - 1
    rows = zip(view.needs, (0, *view.waited[:-1]), view.waited, view.issued, strict=True)
    for needs, before, waited, issued in reversed(list(rows)):
        kept_free = view.reductions[issued] - view.reductions[max(0, issued - policy.reductions)]
        room = budget_bytes - needs - kept_free + sums[waited]
        while limit > waited and (sums[limit] > room or limit - before > ahead):
            limit -= 1
        most.append(limit)
    return most[::-1]


def _latest_waits(
    stage: Stage, view: View, most: Sequence[int], budget_bytes: int
) -> tuple[int, ...]:
    """Each reduction is waited for right before the event that needs its memory."""
    waits: list[int] = []
    rows = zip(view.positions, view.needs, view.waited, view.issued, most, strict=True)
    for position, needs, waited, issued, gathers in rows:
        room = budget_bytes - needs - (view.gathers[gathers] - view.gathers[waited])
        while len(waits) < issued and view.reductions[issued] - view.reductions[len(waits)] > room:
            waits.append(wait_before(stage, len(waits), position))
    waits.extend([stage.end] * (len(stage.reductions) - len(waits)))
    return tuple(waits)


def wait_before(stage: Stage, reduction: int, position: int) -> int:
    """Where to wait for a reduction that is issued when ready, so that `position` comes after."""
    slot, phase = divmod(position, stage.stride)
    if stage.reductions[reduction].at < slot * stage.stride:
        return slot * stage.stride + REDUCE_WAIT
    return slot * stage.stride + (REDUCE_ISSUE if phase == REDUCE_ISSUE else REDUCE_WAIT_LATE)
