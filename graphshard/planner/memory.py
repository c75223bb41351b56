"""The memory that a stage needs with nothing in flight but what has to be.

In come the stages of all micro-steps, which are alike but for their costs; out come a
`MemoryProfile` (what each event adds) and, for a budget, a `View` (what is needed at each event,
the worst of all micro-steps). On the way each reduction finds its slot: the first after its
gradients are ready where packing them fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import add, itemgetter

from graphshard.planner.events import Event
from graphshard.planner.memo import Memo, once
from graphshard.planner.stage import Job, Stage


@dataclass(frozen=True, slots=True)
class Change:
    """What an event does to memory in each micro-step: `rises` while it runs, `grows` after it.

    waits: it is the wait for a gather.
    """

    rises: tuple[int, ...]
    grows: tuple[int, ...]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What happens in a stage, in order.

    visits: positions with the fixed event there, or None for a point where reductions may be
    issued; ready: which are ready at such a point. gathers: running sum of what the gathers hold
    in flight, from 0. collectives: how many of the first of them are not copies from the host.
    flights: what each reduction holds. keeps_order: no reduction is packed before one that was
    ready earlier.
    """

    starts: tuple[int, ...]
    visits: tuple[tuple[int, Change | None], ...]
    ready: dict[int, list[int]]
    reductions: tuple[Change, ...]
    gathers: tuple[int, ...]
    collectives: tuple[int, ...]
    flights: tuple[int, ...]
    keeps_order: bool


@dataclass(frozen=True, slots=True)
class View:
    """One row per fixed event and reduction issue, in order of positions.

    A row: position; bytes needed while the event runs, those that its own job has in flight
    included; gathers waited for before it, and including it; reductions issued before it. It is a
    plain tuple because one with names costs 8 % of the planning.
    order, issues: reductions as they are issued, and where. reductions: running sum of their
    flights, from 0.
    """

    rows: tuple[tuple[int, int, int, int, int], ...]
    order: tuple[int, ...]
    issues: tuple[int, ...]
    reductions: tuple[int, ...]


def profile_of(memo: Memo, stages: Sequence[Stage], starts: Sequence[int]) -> MemoryProfile:
    """starts: bytes in memory when each stage starts.

    A gather's wait counts what its issue leaves behind too, and a reduction's issue leaves out
    what is in flight until its wait: that is counted apart.
    """
    gathers = [{id(j.wait): j for j in s.gathers} for s in stages]
    visits: list[tuple[int, Change | None]] = []
    for column in zip(*(s.fixed for s in stages), strict=True):
        events = [event for _, event in column]
        jobs = [found.get(id(e)) for found, e in zip(gathers, events, strict=True)]
        change = once(memo, ("change", *events), partial(_change, events, jobs))
        visits.append((column[0][0], change))
    ready: dict[int, list[int]] = defaultdict(list)
    for index, job in enumerate(stages[0].reductions):
        ready[job.at].append(index)
    if ready:
        points = range(min(ready), stages[0].end, stages[0].stride)
        visits = sorted([*visits, *((at, None) for at in points)], key=itemgetter(0))
    return MemoryProfile(
        tuple(starts),
        tuple(visits),
        ready,
        tuple(
            once(memo, ("packing", *(j.issue for j in jobs)), partial(_packing, jobs))
            for jobs in zip(*(s.reductions for s in stages), strict=True)
        ),
        tuple(accumulate(_flights(s.gathers for s in stages), initial=0)),
        tuple(accumulate((bool(job.bucket.groups) for job in stages[0].gathers), initial=0)),
        tuple(_flights(s.reductions for s in stages)),
        memo.problem.keeps_reduce_order,
    )


def _flights(jobs: Iterable[Sequence[Job]]) -> list[int]:
    return [max(j.flight_bytes for j in column) for column in zip(*jobs, strict=True)]


def _change(events: Sequence[Event], jobs: Sequence[Job | None]) -> Change:
    rises, grows = [], []
    for event, job in zip(events, jobs, strict=True):
        rise, grow = event.alloc_bytes + event.brief_bytes, event.alloc_bytes - event.free_bytes
        if job is not None:
            rise += job.flight_bytes
            grow += job.issue.alloc_bytes - job.issue.free_bytes
        rises.append(rise)
        grows.append(grow)
    return Change(tuple(rises), tuple(grows), jobs[0] is not None)


def _packing(jobs: Sequence[Job]) -> Change:
    issues = [j.issue for j in jobs]
    kept = (j.flight_bytes for j in jobs)
    rises = tuple(e.alloc_bytes + e.brief_bytes for e in issues)
    grows = tuple(
        e.alloc_bytes - e.free_bytes - flight for e, flight in zip(issues, kept, strict=True)
    )
    return Change(rises, grows)


def view_of(profile: MemoryProfile, budget_bytes: int, room: int = 0) -> View:
    """Memory at each event, with each reduction at the first point where packing it fits.

    room: packing also leaves space for so many gathers in flight. At the last point everything
    that is left is packed, what fits first.
    """
    held, waited = profile.starts, 0
    last = max((at for at, change in profile.visits if change is None), default=-1)
    rows: list[tuple[int, int, int, int, int]] = []
    order: list[int] = []
    issues: list[int] = []
    pending: list[int] = []
    for position, change in profile.visits:
        if change is not None:
            needs, before = _most(held, change.rises), waited
            waited += change.waits
            rows.append((position, needs, before, waited, len(order)))
            held = _after(held, change.grows)
            continue
        pending += profile.ready.get(position, ())
        ahead = min(waited + room, len(profile.gathers) - 1)
        limit = budget_bytes - profile.gathers[ahead] + profile.gathers[waited]
        while pending:
            open_jobs = pending[:1] if profile.keeps_order else pending
            sizes = [_most(held, profile.reductions[job].rises) for job in open_jobs]
            place = next((i for i, size in enumerate(sizes) if size <= limit), None)
            if place is None and position < last:
                break
            place = sizes.index(min(sizes)) if place is None else place
            rows.append((position, sizes[place], waited, waited, len(order)))
            order.append(pending.pop(place))
            issues.append(position)
            held = _after(held, profile.reductions[order[-1]].grows)
    sums = accumulate((profile.flights[job] for job in order), initial=0)
    return View(tuple(rows), tuple(order), tuple(issues), tuple(sums))


def _most(held: tuple[int, ...], rises: tuple[int, ...]) -> int:
    if len(held) == 1:  # one micro-step: by far the most frequent case
        return held[0] + rises[0]
    return max([h + r for h, r in zip(held, rises, strict=True)])


def _after(held: tuple[int, ...], grows: tuple[int, ...]) -> tuple[int, ...]:
    if len(held) == 1:
        return (held[0] + grows[0],)
    return tuple(map(add, held, grows))
