"""Blocks that are alike, told once: `bunches_of(sheet)`.

In comes a `Sheet`; out come `Bunch`es of groups in the plan's order, all groups in one of them. The
table and the residency picture fold the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.view.ranges import LEAST, groups_text, is_next
from graphshard.view.sheet import Sheet
from graphshard.view.timeline import ResidencyRow


@dataclass(frozen=True, slots=True)
class Bunch:
    """Rows of `Timeline.residency`: one, or LEAST and more that are alike."""

    name: str
    rows: tuple[ResidencyRow, ...]

    @property
    def is_folded(self) -> bool:
        return len(self.rows) > 1


def bunches_of(sheet: Sheet) -> list[Bunch]:
    """Neighbours whose names count on, of one size."""
    found: list[Bunch] = []
    for run in _runs(sheet.rows.residency):
        parts = [run] if len(run) >= LEAST else [[row] for row in run]
        for rows in parts:
            names = [sheet.names[row.group.id] for row in rows]
            found.append(Bunch(groups_text(names), tuple(rows)))
    return found


def _runs(rows: tuple[ResidencyRow, ...]) -> Iterator[list[ResidencyRow]]:
    run: list[ResidencyRow] = []
    for row in rows:
        if run and not is_next(run[-1].group, row.group):
            yield run
            run = []
        run.append(row)
    if run:
        yield run
