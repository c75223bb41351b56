"""When each group is gathered: one row per group, from the issue of its gather to its release.

In comes a `Sheet`; out come rows in the plan's order of groups. A group that is kept until backward
has two marks that adjoin: one as gathered, one as kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.schedule.plan import GroupInfo
from graphshard.view.bunches import bunches_of
from graphshard.view.cards import decisions
from graphshard.view.marks import AxisMark, MarkRow
from graphshard.view.sheet import Sheet
from graphshard.view.text import bytes_text
from graphshard.view.timeline import Bar, ResidencyRow


def residency_rows(sheet: Sheet) -> list[MarkRow]:
    """One row per group; empty if the plan never gathers it. course: the name of its bunch."""
    return [
        MarkRow(
            sheet.names[row.group.id],
            tuple(_marks(sheet, row)),
            course=bunch.name if bunch.is_folded else "",
            bunch=number if bunch.is_folded else -1,
        )
        for number, bunch in enumerate(bunches_of(sheet))
        for row in bunch.rows
    ]


def resident(sheet: Sheet, row: ResidencyRow) -> float:
    """How much of the axis the group's bars cover."""
    spans = (_span(sheet, bar) for bar in row.bars)
    return sum(end - start for start, end in spans)


def _span(sheet: Sheet, bar: Bar) -> tuple[float, float]:
    return sheet.axis.reached[bar.first], sheet.axis.done[bar.last]


def _marks(sheet: Sheet, row: ResidencyRow) -> Iterator[AxisMark]:
    for bar in row.bars:
        start, end = _span(sheet, bar)
        if bar.kept_from is None:
            yield _mark(sheet, row.group, "held", start, end, bar)
        else:
            turn = sheet.axis.done[bar.kept_from]
            yield _mark(sheet, row.group, "held", start, turn, bar)
            yield _mark(sheet, row.group, "kept", turn, end, bar)


def _mark(
    sheet: Sheet, group: GroupInfo, kind: str, start: float, end: float, bar: Bar
) -> AxisMark:
    name = sheet.names[group.id]
    title = f"{name}, gathered" if kind == "held" else f"{name}, kept gathered after forward"
    card = [
        ("size", bytes_text(group.gathered_bytes)),
        ("from", sheet.place_text(start)),
        ("until", sheet.place_text(end) if bar.released else "not released within this plan"),
    ]
    if sheet.axis.timed:
        card.append(("for", sheet.place_text(end - start)))
    card += decisions(sheet, group.id)
    return AxisMark(kind, start, end, title, tuple(card), (group.id,))
