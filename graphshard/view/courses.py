"""The same step as FSDP2 would run it, and as it was measured: lanes to lay below the plan's own.

In comes a `Sheet`. Out come rows as of `lanes.py`, with less said of each mark: what the cards say
of the plan's own collectives is not known of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphshard.schedule.plan import Baseline, Direction, Estimate, GroupInfo, Plan, Step
from graphshard.view.marks import AxisMark, MarkRow
from graphshard.view.misses import Part, varying_waits_us
from graphshard.view.ranges import groups_text, short_text
from graphshard.view.scenario import FSDP2, MEASURED, measured_course
from graphshard.view.sheet import Sheet
from graphshard.view.text import LANE_WORDS, MARK_KINDS, bytes_text, lane_names
from graphshard.view.units import change_text, time_text

UNKNOWN = (
    "the whole step was timed too, and it took so much longer than the parts that were timed one "
    "by one: what runs between them (the host, other processes), and medians that do not add up"
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One step: `wait_us` of waiting, then `work_us` of work."""

    direction: Direction
    step: Step
    wait_us: float
    work_us: float


def course_rows(sheet: Sheet) -> list[MarkRow]:
    """FSDP2's, then what was measured; nothing of what is not known."""
    plan = sheet.plan
    rows: list[MarkRow] = []
    if plan.fsdp2 is not None and plan.fsdp2.forecasts:
        note = _note(*_whole(plan.fsdp2))
        rows += _rows(sheet, FSDP2, note, plan.fsdp2, *_optimizer(sheet, FSDP2, plan.fsdp2))
    if sheet.measured is not None:
        course = measured_course(plan, sheet.measured)
        rows += _rows(sheet, MEASURED, _measured_note(sheet), course, *_unknown(sheet, course))
    return rows


def own_note(plan: Plan) -> str:
    """Of the plan itself, which other rows draw."""
    return _note(*_whole(Baseline(plan.schedules, plan.forecasts)))


def optimizer_mark(name: str, start: float, estimate: Estimate) -> list[AxisMark]:
    """The optimizer's step, after backward; none where it is not priced."""
    if not estimate.optimizer_us:
        return []
    end = start + estimate.optimizer_us
    card = (("start", time_text(start)), ("duration", time_text(end - start)))
    return [AxisMark("optimizer", start, end, f"{name}: optimizer", card, label="optimizer")]


def shows_all(plan: Plan) -> bool:
    """The axis shows the whole step, not one micro-step of several."""
    estimate, shown_us = plan.estimate, sum(f.us for f in plan.forecasts)
    return abs(estimate.step_time_us - shown_us) <= 1e-6 * shown_us


def drawn_us(plan: Plan) -> float:
    """What shares of waits are of: the whole step, or the one micro-step that the axis shows."""
    if shows_all(plan):
        return plan.estimate.whole_step_us
    return sum(forecast.us for forecast in plan.forecasts)


def _optimizer(sheet: Sheet, name: str, course: Baseline) -> list[AxisMark]:
    if not shows_all(sheet.plan):
        return []
    return optimizer_mark(name, _whole(course)[0], sheet.plan.estimate)


def _unknown(sheet: Sheet, course: Baseline) -> list[AxisMark]:
    """What the whole measured step took more than its parts."""
    assert sheet.measured is not None
    start, end = _whole(course)[0], sheet.measured.step_time_us
    if end <= start:
        return []
    card = [("start", time_text(start)), ("duration", time_text(end - start)), ("what", UNKNOWN)]
    if (varying_us := varying_waits_us(sheet.measured)) > 0:
        card.append(("of it", f"{time_text(varying_us)} of {Part.VARYING}"))
    title = f"{MEASURED}: not attributed"
    return [AxisMark("unknown", start, end, title, tuple(card), label="unattributed")]


def _whole(course: Baseline) -> tuple[float, float]:
    """Its time, and how much of that compute waits."""
    return sum(f.us for f in course.forecasts), sum(f.exposed_us for f in course.forecasts)


def _measured_note(sheet: Sheet) -> str:
    """Of whole steps: medians of parts do not add up to them."""
    assert sheet.measured is not None
    note = _note(sheet.measured.step_time_us, sheet.measured.exposed_us)
    estimate = sheet.plan.estimate
    if sheet.measured.step_time_us == 0:
        return note
    change = change_text(sheet.measured.step_time_us, estimate.step_time_us)
    own = time_text(estimate.step_time_us)
    return f"{note}, without the optimizer: {change} against the {own} predicted"


def _note(step_us: float, exposed_us: float) -> str:
    return f"{time_text(step_us)}, exposed {time_text(exposed_us)}"


# -- rows ----------------------------------------------------------------------------------------


def _rows(
    sheet: Sheet, name: str, note: str, course: Baseline, *more: AxisMark
) -> Iterator[MarkRow]:
    """more: marks of the compute lane, after all others."""
    marks = (*_marks(sheet, name, _pieces(course)), *more)
    yield MarkRow("compute", marks, 1, name, note)
    by_id = {group.id: group for group in sheet.plan.groups}
    lanes: dict[int, list[AxisMark]] = {}
    kinds = []
    offset_us = 0.0
    for schedule, forecast in zip(course.schedules, course.forecasts, strict=True):
        for found in forecast.collectives:
            step = schedule.steps[found.issue]
            kinds.append((found.lane, step.lane))
            span = offset_us + found.start_us, offset_us + found.end_us
            mark = _collective(sheet, name, schedule.direction, step, span, by_id)
            lanes.setdefault(found.lane, []).append(mark)
        offset_us += forecast.us
    for lane, title in lane_names(kinds).items():
        yield MarkRow(title, tuple(_apart(lanes[lane])), 1, name)


def _apart(marks: Iterable[AxisMark]) -> Iterator[AxisMark]:
    """A lane runs one after the other; medians may say otherwise."""
    before: AxisMark | None = None
    for mark in sorted(marks, key=lambda one: one.start):
        if before is not None:
            yield replace(before, end=min(before.end, mark.start))
        before = mark
    if before is not None:
        yield before


def _collective(
    sheet: Sheet,
    name: str,
    direction: Direction,
    step: Step,
    span: tuple[float, float],
    by_id: dict[int, GroupInfo],
) -> AxisMark:
    names = [sheet.names[group] for group in step.groups]
    start, end = span
    size = sheet.plan.entry(direction, step).size_bytes
    card = (
        ("bytes", bytes_text(size)),
        ("start", time_text(start)),
        ("duration", time_text(end - start)),
    )
    title = f"{name}: {direction} {LANE_WORDS[step.lane]}, {groups_text(names)}"
    kind = MARK_KINDS[step.lane]
    return AxisMark(kind, start, end, title, card, step.groups, short_text(names))


def _pieces(course: Baseline) -> Iterator[_Piece]:
    for schedule, forecast in zip(course.schedules, course.forecasts, strict=True):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            yield _Piece(schedule.direction, step, time.exposed_us, time.work_us)


def _marks(sheet: Sheet, name: str, pieces: Iterable[_Piece]) -> Iterator[AxisMark]:
    """Work between two waits is one mark."""
    since = now = 0.0
    direction = Direction.FORWARD
    for piece in pieces:
        if (piece.wait_us > 0 or piece.direction is not direction) and now > since:
            yield _work(name, direction, since, now)
            since = now
        direction = piece.direction
        if piece.wait_us > 0:
            since = now + piece.wait_us
            yield _waiting(sheet, name, piece, now, since)
        now = now + piece.wait_us + piece.work_us
    if now > since:
        yield _work(name, direction, since, now)


def _work(name: str, direction: Direction, start: float, end: float) -> AxisMark:
    card = (("start", time_text(start)), ("duration", time_text(end - start)))
    return AxisMark(str(direction), start, end, f"{name}: {direction}", card, label=str(direction))


def _waiting(sheet: Sheet, name: str, piece: _Piece, start: float, end: float) -> AxisMark:
    groups = groups_text([sheet.names[g] for g in piece.step.groups if g in sheet.names])
    kind = LANE_WORDS[piece.step.lane]
    what = f"waits for the {kind} of {groups}" if groups else "waits"
    card = (("start", time_text(start)), ("exposed", time_text(end - start)))
    return AxisMark("wait", start, end, f"{name}: {what}", card, piece.step.groups)
