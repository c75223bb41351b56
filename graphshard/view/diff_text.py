"""A `Diff` as plain text, 92 columns wide, and as a dict for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from graphshard.view.diff import PASSES, ComparedFigure, Contribution, Diff
from graphshard.view.moves import MoveRow
from graphshard.view.text import WIDTH, bytes_text, count_text
from graphshard.view.units import change_text, time_text

MOVE_WIDTH = 52
NUMBER_WIDTHS = (12, 12, 12)
# Rows of a section before the rest is one row.
MOST_ROWS = 12


def diff_text(found: Diff) -> str:
    """Figures, what moved, and why the step time differs; the last part adds up to the change."""
    lines = [_line("", (found.before, found.after, "change"))]
    lines += [_time_row(found.step_time_us), _exposed_row(found), _peak_row(found.peak_bytes)]
    if found.moves:
        lines += ["", f"what moved ({count_text(len(found.moves), 'step')})"]
        lines += _moves(found.moves)
    lines += ["", *_why(found)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def diff_dict(found: Diff) -> dict[str, Any]:
    """Microseconds and bytes; the contributions' changes add up to that of the step time."""
    figures = (found.step_time_us, found.exposed_us, found.peak_bytes)
    names = ("step_time_us", "exposed_us", "peak_bytes")
    return {
        "before": found.before,
        "after": found.after,
        **{
            name: {"before": figure.before, "after": figure.after, "change": figure.change}
            for name, figure in zip(names, figures, strict=True)
        },
        "moves": [asdict(move) for move in found.moves],
        "contributions": [{**asdict(c), "change_us": c.change_us} for c in found.contributions],
    }


def _time_row(figure: ComparedFigure) -> str:
    assert figure.before is not None
    assert figure.after is not None
    change = change_text(figure.after, figure.before)
    return _line(figure.name, (time_text(figure.before), time_text(figure.after), change))


def _exposed_row(found: Diff) -> str:
    figure = found.exposed_us
    assert figure.before is not None
    assert figure.after is not None
    cells = time_text(figure.before), time_text(figure.after), _signed(figure.change or 0.0)
    return _line(figure.name, cells)


def _peak_row(figure: ComparedFigure) -> str:
    cells = ["-" if n is None else bytes_text(int(n)) for n in (figure.before, figure.after)]
    change = figure.change
    sign = "" if not change else "-" if change < 0 else "+"
    text = "" if change is None else f"{sign}{bytes_text(abs(int(change)))}"
    return _line(figure.name, (*cells, text))


def _moves(found: Sequence[MoveRow]) -> Iterator[str]:
    """One row per kind of move, with the groups that it is about."""
    rows: dict[str, list[str]] = {}
    for move in found:
        rows.setdefault(move.text, []).append(" + ".join(move.groups))
    for text, groups in list(rows.items())[:MOST_ROWS]:
        yield _fit(f"  {text}", MOVE_WIDTH) + _listed(groups, WIDTH - MOVE_WIDTH)
    if len(rows) > MOST_ROWS:
        yield f"  and {len(rows) - MOST_ROWS} more kinds of moves"


def _listed(groups: Sequence[str], room: int) -> str:
    """As many names as fit, and how many there are."""
    for count in range(len(groups), 0, -1):
        rest = "" if count == len(groups) else f", ... ({len(groups)})"
        text = ", ".join(groups[:count]) + rest
        if len(text) <= room:
            return text
    return f"{len(groups)} groups"


def _why(found: Diff) -> Iterator[str]:
    change_us = found.step_time_us.change or 0.0
    what = f"{PASSES} differ" if found.step_time_us.name == PASSES else "the step time differs"
    yield _line(f"why {what} by {_signed(change_us)}",
                (found.before, found.after, "change"))  # fmt: skip
    shown, others = found.contributions[:MOST_ROWS], found.contributions[MOST_ROWS:]
    for part in shown:
        yield _part(f"  {part.kind}, {part.name}", [part])
    if others:
        yield _part(f"  {count_text(len(others), 'other part')}", others)
    together_us = sum(part.change_us for part in found.contributions)
    yield _line("  together", ("", "", _signed(together_us)))


def _part(name: str, parts: Iterable[Contribution]) -> str:
    own = list(parts)
    before_us, after_us = sum(p.before_us for p in own), sum(p.after_us for p in own)
    cells = time_text(before_us), time_text(after_us), _signed(sum(p.change_us for p in own))
    return _line(name, cells)


def _signed(us: float) -> str:
    return f"{'+' if us > 0 else ''}{time_text(us)}"


def _line(name: str, cells: Iterable[str]) -> str:
    pairs = zip(cells, NUMBER_WIDTHS, strict=True)
    return _fit(name, WIDTH - sum(NUMBER_WIDTHS)) + "".join(c.rjust(w) for c, w in pairs)


def _fit(name: str, room: int) -> str:
    """The end of an FQN tells more than its beginning."""
    if len(name) >= room:
        name = name[: len(name) - len(name.lstrip())] + "..." + name[len(name) - room + 6 :]
    return name.ljust(room)
