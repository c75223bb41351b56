"""The table of groups: the pictures' numbers as text.

In comes a `Sheet`. Out comes a `Table`: titles, and a row of cells per group in the plan's order. A
cell has its text and what the page sorts by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.schedule.plan import GroupInfo, Lane
from graphshard.schedule.reasons import Recomputation
from graphshard.view.bunches import bunches_of
from graphshard.view.cards import COMPUTED_AGAIN, KEPT, RESHARDED, decisions
from graphshard.view.residency import resident
from graphshard.view.sheet import CollectiveBar, Sheet
from graphshard.view.text import bytes_text, group_name
from graphshard.view.timeline import ResidencyRow
from graphshard.view.units import time_text

MOST_TEXTS = 2  # of a bunch, in one cell
RESHARD_WORDS = (KEPT, RESHARDED)


@dataclass(frozen=True, slots=True)
class Cell:
    """key: numbers sort by size, texts by letter. Of a bunch: what is alike, or from least to
    most."""

    text: str
    key: float | str


@dataclass(frozen=True, slots=True)
class GroupLine:
    group: int
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Bunched:
    """Lines of groups that are alike, below one line for all of them; or a single line."""

    name: str
    cells: tuple[Cell, ...]
    lines: tuple[GroupLine, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """titles: of the cells, without the group's own column. The last column is prose."""

    titles: tuple[str, ...]
    bunches: tuple[Bunched, ...]

    @property
    def lines(self) -> tuple[GroupLine, ...]:
        return tuple(line for bunch in self.bunches for line in bunch.lines)


@dataclass(frozen=True, slots=True)
class _Share:
    """Microseconds of a group's collectives; one that is shared counts by bytes."""

    gather_us: float = 0.0
    reduce_us: float = 0.0
    all_reduce_us: float = 0.0
    exposed_us: float = 0.0


def table_of(sheet: Sheet) -> Table:
    """With times where the plan has any."""
    shares = _shares(sheet)
    titles: tuple[str, ...] = ("parameters", "gathered")
    if sheet.axis.timed:
        titles += ("all-gathers", "reduce-scatters")
        titles += ("all-reduces",) if _all_reduces(sheet) else ()
        titles += ("exposed", "gathered for")
    again = _computed_again(sheet)
    if again:
        titles += (COMPUTED_AGAIN,)
    titles += ("after forward", "because")
    bunches = (
        _bunched(bunch.name, tuple(_line(sheet, row, shares, again) for row in bunch.rows))
        for bunch in bunches_of(sheet)
    )
    return Table(titles, tuple(bunches))


def _bunched(name: str, lines: tuple[GroupLine, ...]) -> Bunched:
    columns = zip(*(line.cells for line in lines), strict=True)
    return Bunched(name, tuple(map(_summed, columns)), lines)


def _summed(cells: tuple[Cell, ...]) -> Cell:
    """From the least to the most; of texts how often each, or if they are many the first."""
    texts = Counter(cell.text for cell in cells)
    if len(texts) == 1:
        return cells[0]
    first = cells[0].text
    if any(isinstance(cell.key, str) for cell in cells):
        if len(texts) > MOST_TEXTS:
            return Cell(f"{first} ... ({len(texts)} different)", first)
        return Cell(", ".join(f"{count} {text}" for text, count in texts.items()), first)
    least, most = (pick(cells, key=lambda cell: float(cell.key)) for pick in (min, max))
    return Cell(f"{least.text} to {most.text}", most.key)


def _line(
    sheet: Sheet, row: ResidencyRow, shares: Mapping[int, _Share], again: Mapping[int, Cell]
) -> GroupLine:
    group = row.group
    cells = [
        _count(len(group.params)),
        Cell(bytes_text(group.gathered_bytes), group.gathered_bytes),
    ]
    if sheet.axis.timed:
        share = shares.get(group.id, _Share())
        cells += map(_time, (share.gather_us, share.reduce_us))
        cells += [_time(share.all_reduce_us)] if _all_reduces(sheet) else []
        cells += map(_time, (share.exposed_us, resident(sheet, row)))
    if again:
        cells.append(again.get(group.id, Cell("-", 0)))
    cells.append(_text("kept" if _kept(row) else "resharded"))
    cells.append(_text(_because(sheet, group)))
    return GroupLine(group.id, group_name(group), tuple(cells))


def _all_reduces(sheet: Sheet) -> bool:
    return any(schedule.num_all_reduces for schedule in sheet.plan.schedules)


def _computed_again(sheet: Sheet) -> dict[int, Cell]:
    """Of what could be: how many activations of each group."""
    found = (reason for reason in sheet.plan.reasons if isinstance(reason, Recomputation))
    return {
        one.group: Cell(f"{len(one.again)} of {one.num_options}", len(one.again)) for one in found
    }


def _kept(row: ResidencyRow) -> bool:
    """As planned; of a group that is never gathered, as set."""
    if not row.bars:
        return not row.group.reshard_after_forward
    return any(bar.kept_from is not None for bar in row.bars)


def _because(sheet: Sheet, group: GroupInfo) -> str:
    for word, text in decisions(sheet, group.id):
        if word in RESHARD_WORDS:
            return text
    return f"as set: reshard_after_forward={group.reshard_after_forward}"


def _shares(sheet: Sheet) -> dict[int, _Share]:
    by_id = {g.id: g for g in sheet.plan.groups}
    found: dict[int, _Share] = {}
    for collective in sheet.collectives:
        for group, part in _parts(collective, by_id):
            found[group] = _plus(found.get(group, _Share()), collective, part)
    return found


def _parts(found: CollectiveBar, by_id: Mapping[int, GroupInfo]) -> list[tuple[int, float]]:
    groups = found.step.groups
    if len(groups) == 1:
        return [(groups[0], 1.0)]
    whole = sum(by_id[group].gathered_bytes for group in groups)
    return [(group, by_id[group].gathered_bytes / whole) for group in groups]


def _plus(before: _Share, found: CollectiveBar, part: float) -> _Share:
    us = part * (found.end - found.start)
    lane = found.step.lane
    return _Share(
        before.gather_us + (us if lane is Lane.ALL_GATHER else 0.0),
        before.reduce_us + (us if lane is Lane.REDUCE_SCATTER else 0.0),
        before.all_reduce_us + (us if lane is Lane.ALL_REDUCE else 0.0),
        before.exposed_us + part * found.exposed_us,
    )


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def _time(us: float) -> Cell:
    return Cell(time_text(us), us)


def _text(text: str) -> Cell:
    return Cell(text, text)
