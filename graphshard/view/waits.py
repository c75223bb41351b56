"""The longest waits of compute: for what, how long, and why that cannot come earlier.

In comes a `Sheet` with the rows of its lanes; out come `Wait`s, the longest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.view.cards import together, why_then
from graphshard.view.marks import MarkRow
from graphshard.view.ranges import groups_text
from graphshard.view.sheet import CollectiveBar, Sheet
from graphshard.view.text import LANE_WORDS
from graphshard.view.units import share_text, time_text

MOST = 5


@dataclass(frozen=True, slots=True)
class Wait:
    """place: of its mark in the compute lane, to point at."""

    place: int
    what: str
    time: str
    share: str
    why: tuple[str, ...]


def longest_waits(sheet: Sheet, lanes: Sequence[MarkRow]) -> list[Wait]:
    """At most MOST of the plan's own; lanes: `lane_rows(sheet)`."""
    found = [c for c in sheet.collectives if c.wait is not None and c.exposed_us > 0]
    found.sort(key=lambda c: -c.exposed_us)
    places = {mark.start: place for place, mark in enumerate(lanes[0].marks) if mark.kind == "wait"}
    return [_wait(sheet, one, places) for one in found[:MOST]]


def _wait(sheet: Sheet, found: CollectiveBar, places: dict[float, int]) -> Wait:
    assert found.wait is not None
    names = groups_text([sheet.names[group] for group in found.step.groups])
    return Wait(
        places[sheet.axis.reached[found.wait]],
        f"the {LANE_WORDS[found.step.lane]} of {names}, in {found.direction}",
        time_text(found.exposed_us),
        share_text(found.exposed_us, sheet.axis.end),
        tuple(_why(sheet, found)),
    )


def _why(sheet: Sheet, found: CollectiveBar) -> Iterator[str]:
    for _, text in (*why_then(sheet, found, cost=False), *together(sheet, found)):
        yield text
