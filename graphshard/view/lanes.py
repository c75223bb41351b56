"""The lanes: what compute does and waits for, and the collectives of each in-order queue.

In comes a `Sheet`. Out come rows: compute first, then one per process group in the planner's order
(without times one per kind of collective, those that overlap below each other).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.schedule.plan import Direction, GroupInfo, Lane, StepKind
from graphshard.schedule.steps import WAITS
from graphshard.view.cards import collective_card, decisions, wait_card
from graphshard.view.courses import optimizer_mark, own_note, shows_all
from graphshard.view.marks import AxisMark, MarkRow
from graphshard.view.ranges import groups_text, short_text
from graphshard.view.scenario import OURS
from graphshard.view.sheet import CollectiveBar, Sheet
from graphshard.view.text import LANE_WORDS, MARK_KINDS, count_text, lane_names
from graphshard.view.timeline import computing_groups
from graphshard.view.units import time_text


def lane_rows(sheet: Sheet) -> list[MarkRow]:
    """Compute, then the queues of collectives."""
    compute = sorted(_compute(sheet), key=lambda mark: mark.start)
    course = OURS if sheet.axis.timed else ""
    if course and shows_all(sheet.plan):
        compute += optimizer_mark(course, sheet.axis.end, sheet.plan.estimate)
    note = own_note(sheet.plan) if course else ""
    return [MarkRow("compute", tuple(compute), 1, course, note), *_queues(sheet, course)]


# -- the compute lane ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """Steps `first` to `last` of compute, nothing in between, inside the same group."""

    first: int
    last: int
    group: int | None
    direction: Direction
    steps: tuple[int, ...]


def _compute(sheet: Sheet) -> Iterator[AxisMark]:
    for work in _works(sheet):
        yield _work_mark(sheet, work)
    for found in sheet.collectives:
        if found.exposed_us > 0:
            yield _wait_mark(sheet, found)
    if sheet.axis.timed:
        yield from _copies(sheet)


def _works(sheet: Sheet) -> Iterator[_Work]:
    """Neighbouring compute steps inside the same group are one piece of work."""
    open_: _Work | None = None
    owners = computing_groups(sheet.rows.steps)
    for index, step in enumerate(sheet.rows.steps):
        if step.kind is not StepKind.COMPUTE:
            continue
        axis, direction = sheet.axis, sheet.rows.direction_of(index)
        here = (owners[index], direction)
        if open_ and (open_.group, open_.direction) == here and _adjoin(axis.done, open_, index):
            open_ = replace(open_, last=index, steps=(*open_.steps, index))
            continue
        if open_:
            yield open_
        open_ = _Work(index, index, *here, (index,))
    if open_:
        yield open_


def _adjoin(done: Sequence[float], work: _Work, index: int) -> bool:
    """Nothing lies between the end of `work` and compute step `index`."""
    return done[work.last] == done[index - 1]


def _work_mark(sheet: Sheet, work: _Work) -> AxisMark:
    axis, steps = sheet.axis, sheet.rows.steps
    ops = sum(steps[i].stop - steps[i].start for i in work.steps)
    start, end = axis.begun[work.first], axis.done[work.last]
    card = [("ops", f"{ops:,}")]
    if axis.timed:
        card += [("start", time_text(start)), ("duration", time_text(end - start))]
        card += _measured(sheet, work)
    else:
        card.insert(0, ("step", str(work.first)))
    card.append((f"{sheet.alive_word}, at most", _most_alive(sheet, work)))
    name = "" if work.group is None else sheet.names[work.group]
    title = f"{work.direction} compute{name and ', '}{name or ', ' + count_text(ops, 'op')}"
    label = name or count_text(ops, "op")
    groups = () if work.group is None else (work.group,)
    return AxisMark(str(work.direction), start, end, title, tuple(card), groups, label)


def _measured(sheet: Sheet, work: _Work) -> list[tuple[str, str]]:
    keys = [(work.direction, sheet.rows.steps[i]) for i in work.steps]
    if not all(key in sheet.measured_us for key in keys):
        return []
    return [("measured", time_text(sum(sheet.measured_us[key] for key in keys)))]


def _most_alive(sheet: Sheet, work: _Work) -> str:
    step = max(range(work.first, work.last + 1), key=lambda i: sheet.alive_bytes[i])
    return sheet.alive_text(step)


def _wait_mark(sheet: Sheet, found: CollectiveBar) -> AxisMark:
    assert found.wait is not None
    kind = LANE_WORDS[found.step.lane]
    names = [sheet.names[group] for group in found.step.groups]
    title = f"compute waits for the {kind} of {groups_text(names)}"
    start, end = sheet.axis.reached[found.wait], sheet.axis.begun[found.wait]
    card = wait_card(sheet, found)
    return AxisMark(
        "wait", start, end, title, card, found.step.groups, f"waits: {short_text(names)}"
    )


def _copies(sheet: Sheet) -> Iterator[AxisMark]:
    """Work of communication steps: copies into and out of buckets."""
    axis = sheet.axis
    for index, step in enumerate(sheet.rows.steps):
        start, end = axis.begun[index], axis.done[index]
        if step.kind is StepKind.COMPUTE or step.group is None or end <= start:
            continue
        names = groups_text([sheet.names[group] for group in step.groups])
        way = "out of" if step.kind in WAITS else "into"
        card = (
            ("start", time_text(start)),
            ("duration", time_text(end - start)),
            (f"{sheet.alive_word} then", sheet.alive_text(index)),
        )
        title = f"copy {way} the {LANE_WORDS[step.lane]} bucket of {names}"
        yield AxisMark("copy", start, end, title, card, step.groups)


# -- the other lanes -----------------------------------------------------------------------------


def _queues(sheet: Sheet, course: str) -> Iterator[MarkRow]:
    by_id = {g.id: g for g in sheet.plan.groups}
    names = lane_names((found.lane, found.step.lane) for found in sheet.collectives)
    for lane, name in names.items():
        own = [found for found in sheet.collectives if found.lane == lane]
        marks = [_collective_mark(sheet, found, by_id) for found in own]
        if not sheet.axis.timed:
            marks += _kept(sheet, own)
        marks.sort(key=lambda mark: (mark.start, mark.row))
        yield MarkRow(name, tuple(marks), 1 + max(mark.row for mark in marks), course)


def _collective_mark(sheet: Sheet, found: CollectiveBar, by_id: dict[int, GroupInfo]) -> AxisMark:
    lane = found.step.lane
    names = [sheet.names[group] for group in found.step.groups]
    title = f"{found.direction} {LANE_WORDS[lane]}, {groups_text(names)}"
    card = collective_card(sheet, found, by_id)
    kind, label = MARK_KINDS[lane], short_text(names)
    return AxisMark(kind, found.start, found.end, title, card, found.step.groups, label, found.row)


def _kept(sheet: Sheet, own: Sequence[CollectiveBar]) -> Iterator[AxisMark]:
    """Gathers that find their group still gathered; drawn where there are no times to draw."""
    if own[0].step.lane is not Lane.ALL_GATHER:
        return
    axis = sheet.axis
    for lane in sheet.rows.lanes:
        for segment in lane.segments:
            if segment.kept and segment.group is not None:
                title = f"{sheet.names[segment.group]}: no all-gather, kept from forward"
                start, end = axis.reached[segment.first], axis.done[segment.last]
                card = (("used from", f"step {segment.first}"), *decisions(sheet, segment.group))
                yield AxisMark("kept", start, end, title, card, (segment.group,), "", segment.row)
