"""What a picture is made of, and its compact form for the page.

A `Mark` is one thing to draw, to point at and to reach with the keyboard. Every word that is shown
or spoken is already in it. `packed` writes rows of marks with each word once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Card = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AxisMark:
    """A segment of the axis. kind: a CSS class; card: what is shown and said of it, in order;
    groups: each a GroupInfo.id; label: written on it where there is room; row: within its lane."""

    kind: str
    start: float
    end: float
    title: str
    card: Card = ()
    groups: tuple[int, ...] = ()
    label: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True)
class MarkRow:
    """Marks in the order in which the arrow keys walk them, on `depth` rows.

    course, note: where a picture shows several courses of the step, the one that it is of, and what
    is said beside that. bunch: neighbours of one bunch (>= 0) are drawn as one until it is opened.
    """

    name: str
    marks: tuple[AxisMark, ...]
    depth: int = 1
    course: str = ""
    note: str = ""
    bunch: int = -1


@dataclass(frozen=True, slots=True)
class Words:
    """Texts by number; equal texts have one number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        return list(self.numbers)


def packed(rows: Iterable[MarkRow], words: Words, digits: int) -> list[dict[str, Any]]:
    """Each mark as a list: kind, start, end, row, groups (with blanks between), label, title, then
    keys and values of its card. All texts are numbers of `words`; places have `digits` digits."""
    return [
        {
            "name": row.name,
            "depth": row.depth,
            "course": row.course,
            "note": row.note,
            "bunch": row.bunch,
            "marks": [_packed(mark, words, digits) for mark in row.marks],
        }
        for row in rows
    ]


def _packed(mark: AxisMark, words: Words, digits: int) -> list[float]:
    card = [words.number(text) for pair in mark.card for text in pair]
    groups = " ".join(map(str, mark.groups))
    texts = [words.number(text) for text in (groups, mark.label, mark.title)]
    places = [round(mark.start, digits), round(mark.end, digits)]
    return [words.number(mark.kind), *places, mark.row, *texts, *card]
