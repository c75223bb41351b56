"""Positions for all jobs of a stage within a memory budget.

For a given order of the gathers and given other contents of memory, `fill` is exact: before each
event it knows the largest number of gathers that may be in flight there and at every later event,
and it issues each gather as soon as that number allows. No placement in that order has an earlier
issue, so none is faster. Reductions are issued where `graphshard.planner.memory` found them a
place and waited for as late as memory allows. What gathers and reductions may take from each
other is the `FillPolicy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.planner.memory import MemoryProfile, View
from graphshard.planner.stage import (
    REDUCE_ISSUE,
    REDUCE_WAIT,
    REDUCE_WAIT_LATE,
    Placement,
    Reduced,
    Stage,
    next_gather_position,
)

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """gathers: at most so many in flight, not counting copies from the host. buffers: for how many
    reductions in flight gathers leave room; 0: gathers take all of it.

    room: for how many gathers the packing of reductions leaves room: a reduction that would take
    it is issued at a later slot.
    """

    gathers: int = UNLIMITED
    buffers: int = UNLIMITED
    room: int = 0


def fill(
    stage: Stage, profile: MemoryProfile, view: View, budget_bytes: int, policy: FillPolicy
) -> Placement:
    """The placement that `policy` gives.

    view: of `profile` under the same budget, with the policy's `room`.
    """
    most = _most_gathers(profile, view, budget_bytes, policy)
    gathers: list[int] = []
    previous = -1
    for position, count in zip(view.positions, most, strict=True):
        if count > len(gathers):
            at = next_gather_position(stage, previous)
            gathers.extend([at] * (count - len(gathers)))
        previous = position
    sums = profile.gathers
    flying = [sums[count] - sums[done] for count, done in zip(most, view.waited, strict=True)]
    return Placement(tuple(gathers), latest_waits(stage, view, flying, budget_bytes))


def _most_gathers(
    profile: MemoryProfile, view: View, budget_bytes: int, policy: FillPolicy
) -> list[int]:
    """For each event, how many gathers may have been issued before it."""
    sums, ahead, buffers = profile.gathers, policy.gathers, policy.buffers
    counts, flights = profile.collectives, view.reductions
    # By the number of reductions issued: what they leave to gathers.
    spare = [
        budget_bytes - flights[issued] + flights[max(0, issued - buffers)]
        for issued in range(len(flights))
    ]
    most, limit = [], len(sums) - 1
    # From the end, since what is issued before an event is issued before all later ones too, so
    # that a limit holds for all earlier events. In flight at an event are the gathers issued and
    # not waited for, of sums[limit] - sums[waited] bytes: no more than the budget leaves beside
    # `needs` and the reductions. Its own gather, which counts as waited for in bytes, is one of
    # those ahead (`before`). What was waited for cannot be given back: `view_of` refuses the rest.
    columns = map(reversed, (view.needs, view.before, view.waited, view.issued))
    for needs, before, waited, issued in zip(*columns, strict=True):
        room, reach = spare[issued] - needs + sums[waited], counts[before] + ahead
        while limit > waited and (sums[limit] > room or counts[limit] > reach):
            limit -= 1
        most.append(limit)
    return most[::-1]


def latest_waits(
    stage: Stage, view: View, flying: Sequence[int], budget_bytes: int
) -> tuple[Reduced, ...]:
    """Each reduction is waited for right before the event that needs its memory.

    flying: bytes of other gathers in flight at each event of `view`.
    """
    waits: list[int] = []
    flights, done = view.reductions, 0
    rows = zip(view.positions, view.needs, view.issued, flying, strict=True)
    for position, needs, issued, others in rows:
        while done < issued and flights[issued] - flights[done] > budget_bytes - needs - others:
            waits.append(wait_before(stage, view.issues[done], position))
            done += 1
    waits.extend([stage.end] * (len(view.order) - len(waits)))
    return tuple(map(Reduced, view.order, view.issues, waits))


def wait_before(stage: Stage, issue: int, position: int) -> int:
    """Where to wait for the reduction issued at `issue`, so that `position` comes after."""
    slot, phase = divmod(position, stage.stride)
    if issue < slot * stage.stride:
        return slot * stage.stride + REDUCE_WAIT
    return slot * stage.stride + (REDUCE_ISSUE if phase == REDUCE_ISSUE else REDUCE_WAIT_LATE)
