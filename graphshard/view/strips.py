"""The same step as FSDP2 would run it, as planned, and as measured: one strip each, one scale.

In comes a `Sheet`. Out come rows of work and waiting, for as many of the three as are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Baseline, Direction, Estimate, Step
from graphshard.view.marks import AxisMark, MarkRow
from graphshard.view.sheet import Sheet
from graphshard.view.text import LANE_WORDS
from graphshard.view.units import time_text


@dataclass(frozen=True, slots=True)
class _Piece:
    """One step: `wait_us` of waiting, then `work_us` of work."""

    direction: Direction
    step: Step
    wait_us: float
    work_us: float


def strip_rows(sheet: Sheet) -> list[MarkRow]:
    """FSDP2 first; empty for a plan without the cost model that was not measured either."""
    plan = sheet.plan
    rows = []
    if plan.fsdp2 is not None:
        rows.append(_row(sheet, "FSDP2, predicted", _predicted(plan.fsdp2)))
    if plan.forecasts:
        own = Baseline(plan.schedules, plan.forecasts)
        rows.append(_row(sheet, "graphshard, predicted", _predicted(own)))
    if sheet.measured is not None:
        note = _measured_note(sheet.measured, plan.estimate)
        rows.append(_row(sheet, "measured", _of_measured(sheet.measured), note))
    return rows


def _predicted(course: Baseline) -> Iterator[_Piece]:
    for schedule, forecast in zip(course.schedules, course.forecasts, strict=True):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            yield _Piece(schedule.direction, step, time.exposed_us, time.work_us)


def _of_measured(measured: Measured) -> Iterator[_Piece]:
    for direction in Direction:
        for segment in measured.of(direction):
            yield _Piece(direction, segment.step, segment.exposed_us, segment.us)


def _measured_note(measured: Measured, estimate: Estimate) -> str:
    """Of whole steps: medians of parts do not add up to them."""
    note = _note(measured.step_time_us, measured.exposed_us)
    if measured.step_time_us == 0:
        return note
    error = (estimate.step_time_us - measured.step_time_us) / measured.step_time_us
    return f"{note}; predicted {error:+.1%}".replace("%", " %")


def _note(step_us: float, exposed_us: float) -> str:
    return f"{time_text(step_us)}, exposed {time_text(exposed_us)}"


def _row(sheet: Sheet, name: str, pieces: Iterable[_Piece], note: str = "") -> MarkRow:
    pieces = list(pieces)
    waiting_us = sum(piece.wait_us for piece in pieces)
    whole_us = waiting_us + sum(piece.work_us for piece in pieces)
    return MarkRow(name, tuple(_marks(sheet, name, pieces)), 1, note or _note(whole_us, waiting_us))


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
    groups = " + ".join(sheet.names[g] for g in piece.step.groups if g in sheet.names)
    kind = LANE_WORDS[piece.step.lane]
    what = f"waits for the {kind} of {groups}" if groups else "waits"
    card = (("start", time_text(start)), ("exposed", time_text(end - start)))
    return AxisMark("wait", start, end, f"{name}: {what}", card, piece.step.groups)
