"""The memory that a stage needs with nothing in flight but what has to be.

In come the stages of all micro-steps, which are alike but for their costs; out come a
`MemoryProfile` (what is needed before any reduction is issued) and, for a budget, a `View` (what is
needed at each event, the worst of all micro-steps). On the way each reduction finds its slot: the
first after its gradients are ready where packing them fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from graphshard.planner.problem import Problem
from graphshard.planner.stage import Job, Stage

# Bytes, one number for each micro-step.
Bytes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """What the issue of a reduction does to memory: `rises` while it runs, `grows` after it."""

    rises: Bytes
    grows: Bytes


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What happens in a stage, in order.

    positions: of the fixed events. needs, held: for each micro-step, with no reduction issued, the
    bytes while each of them runs, and before each of them and after the last. waited: so many
    gathers were waited for before each, and after the last.

    points: where reductions may be issued; ready: which are ready at such a point. gathers: running
    sum of what the gathers hold in flight, from 0. collectives: how many of the first of them are
    not copies from the host. flights: what each reduction holds. keeps_order: no reduction is
    packed before one that was ready earlier.
    """

    positions: list[int]
    needs: list[list[int]]
    held: list[list[int]]
    waited: list[int]
    points: range
    ready: dict[int, list[int]]
    reductions: tuple[Packing, ...]
    gathers: tuple[int, ...]
    collectives: tuple[int, ...]
    flights: tuple[int, ...]
    keeps_order: bool


@dataclass(slots=True)
class View:
    """One row per fixed event and reduction issue, in order of positions.

    Of each row: position; bytes needed while the event runs, those that its own job has in flight
    included; gathers waited for before it, and including it; reductions issued before it.
    order, issues: reductions as they are issued, and where. reductions: running sum of their
    flights, from 0.
    """

    positions: list[int]
    needs: list[int]
    before: list[int]
    waited: list[int]
    issued: list[int]
    order: list[int]
    issues: list[int]
    reductions: list[int]


def profile_of(problem: Problem, stages: Sequence[Stage], starts: Sequence[int]) -> MemoryProfile:
    """starts: bytes in memory when each stage starts.

    A gather's wait counts what its issue leaves behind too, and a reduction's issue leaves out
    what is in flight until its wait: that is counted apart.
    """
    first = stages[0]
    positions = [at for at, _ in first.fixed]
    # Nothing else is where a gather is waited for, and that is the same in all stages.
    waits = [bisect_left(positions, job.at) for job in first.gathers]
    is_wait = [0] * len(positions)
    for place in waits:
        is_wait[place] = 1
    held = [_held(stage, start, waits) for stage, start in zip(stages, starts, strict=True)]
    ready: dict[int, list[int]] = defaultdict(list)
    for index, job in enumerate(first.reductions):
        ready[job.at].append(index)
    return MemoryProfile(
        positions,
        [_needs(stage, own, waits) for stage, own in zip(stages, held, strict=True)],
        held,
        [*accumulate(is_wait, initial=0)],
        range(min(ready, default=first.end), first.end, first.stride),
        ready,
        tuple(_packing(jobs) for jobs in zip(*(s.reductions for s in stages), strict=True)),
        tuple(accumulate(_flights(s.gathers for s in stages), initial=0)),
        tuple(accumulate((bool(job.bucket.groups) for job in first.gathers), initial=0)),
        tuple(_flights(s.reductions for s in stages)),
        problem.keeps_reduce_order,
    )


def _held(stage: Stage, start: int, waits: Sequence[int]) -> list[int]:
    grows = [event.alloc_bytes - event.free_bytes for _, event in stage.fixed]
    for place, job in zip(waits, stage.gathers, strict=True):
        grows[place] += job.issue.alloc_bytes - job.issue.free_bytes
    return [*accumulate(grows, initial=start)]


def _needs(stage: Stage, held: list[int], waits: Sequence[int]) -> list[int]:
    rises = [event.alloc_bytes + event.brief_bytes for _, event in stage.fixed]
    for place, job in zip(waits, stage.gathers, strict=True):
        rises[place] += job.flight_bytes
    return [*map(add, held, rises)]


def _flights(jobs: Iterable[Sequence[Job]]) -> list[int]:
    return [max(j.flight_bytes for j in column) for column in zip(*jobs, strict=True)]


def _packing(jobs: Sequence[Job]) -> Packing:
    return Packing(
        tuple(j.issue.alloc_bytes + j.issue.brief_bytes for j in jobs),
        tuple(j.issue.alloc_bytes - j.issue.free_bytes - j.flight_bytes for j in jobs),
    )


def view_of(profile: MemoryProfile, budget_bytes: int, room: int = 0) -> View | None:
    """Memory at each event, with each reduction at the first point where packing it fits; None if
    the budget does not allow that.

    room: packing also leaves space for so many gathers in flight. At the last point everything
    that is left is packed, what fits first.
    """
    view = View([], [], [], [], [], [], [], [])
    added: Bytes = (0,) * len(profile.held)  # by the reductions issued so far
    pending: list[int] = []
    for position in profile.points:
        pending += profile.ready.get(position, ())
        if not pending:
            continue
        place = bisect_left(profile.positions, position)
        if _extend(view, profile, place, added) > budget_bytes:
            return None
        waited = profile.waited[place]
        ahead = min(waited + room, len(profile.gathers) - 1)
        limit = budget_bytes - profile.gathers[ahead] + profile.gathers[waited]
        while pending:
            held = tuple(own[place] + more for own, more in zip(profile.held, added, strict=True))
            open_jobs = pending[:1] if profile.keeps_order else pending
            needs = (_most(held, profile.reductions[job].rises) for job in open_jobs)
            found = next((i for i, size in enumerate(needs) if size <= limit), None)
            if found is None:
                if position != profile.points[-1]:
                    break
                sizes = [_most(held, profile.reductions[job].rises) for job in open_jobs]
                found = sizes.index(min(sizes))
            packing = profile.reductions[pending[found]]
            _issue(view, position, _most(held, packing.rises), waited, pending.pop(found))
            if view.needs[-1] > budget_bytes:
                return None
            added = tuple(map(add, added, packing.grows))
    if _extend(view, profile, len(profile.positions), added) > budget_bytes:
        return None
    view.reductions.extend(accumulate((profile.flights[job] for job in view.order), initial=0))
    return view


def _extend(view: View, profile: MemoryProfile, stop: int, added: Bytes) -> int:
    """The fixed events that come next, up to the one at `stop`. Returns what they need."""
    start = len(view.positions) - len(view.order)
    columns = [
        [needs + more for needs in own[start:stop]]
        for own, more in zip(profile.needs, added, strict=True)
    ]
    needs = columns[0] if len(columns) == 1 else [*map(max, *columns)]
    view.positions += profile.positions[start:stop]
    view.needs += needs
    view.before += profile.waited[start:stop]
    view.waited += profile.waited[start + 1 : stop + 1]
    view.issued += [len(view.order)] * (stop - start)
    return max(needs, default=0)


def _issue(view: View, position: int, needs: int, waited: int, job: int) -> None:
    view.positions.append(position)
    view.needs.append(needs)
    view.before.append(waited)
    view.waited.append(waited)
    view.issued.append(len(view.order))
    view.order.append(job)
    view.issues.append(position)


def _most(held: Bytes, rises: Bytes) -> int:
    if len(held) == 1:  # one micro-step is by far the most frequent case
        return held[0] + rises[0]
    return max(h + r for h, r in zip(held, rises, strict=True))
