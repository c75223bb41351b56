"""What compute waits for: all waits of a kind, and the longest single ones, with why they cannot be
earlier.

In comes a plan, or a `Sheet` with the rows of its lanes; out come `Waited`s and `Wait`s, the
longest first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.plan import Direction, Lane, Plan
from graphshard.view.cards import together, why_then
from graphshard.view.courses import drawn_us
from graphshard.view.marks import MarkRow
from graphshard.view.ranges import groups_text
from graphshard.view.sheet import CollectiveBar, Sheet
from graphshard.view.text import LANE_WORDS, count_text
from graphshard.view.units import share_text, time_text

MOST = 5
LEAST = 0.001  # of the step: less has no share of its own


@dataclass(frozen=True, slots=True)
class Wait:
    """place: of its mark in the compute lane, to point at."""

    place: int
    what: str
    time: str
    share: str
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waited:
    """All waits for collectives of one kind in one direction."""

    lane: Lane
    direction: Direction
    us: float
    count: int


def waited(plan: Plan) -> list[Waited]:
    """Empty for a plan without forecasts."""
    found: dict[tuple[Lane, Direction], list[float]] = defaultdict(list)
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=False):
        for step, time in zip(schedule.steps, forecast.steps, strict=True):
            if time.exposed_us > 0:
                found[step.lane, schedule.direction].append(time.exposed_us)
    every = [Waited(*kind, sum(each), len(each)) for kind, each in found.items()]
    return sorted(every, key=lambda one: -one.us)


def kind_text(one: Waited) -> str:
    """ "reduce-scatters in backward"."""
    return f"{LANE_WORDS[one.lane]}s in {one.direction}"


def waited_text(plan: Plan) -> str:
    """ "255 ms in all: 147 ms in 31 waits for reduce-scatters in backward"; empty without waits."""
    every = waited(plan)
    parts = [
        f"{time_text(one.us)} in {count_text(one.count, 'wait')} for {kind_text(one)}"
        for one in every
    ]
    return f"{time_text(sum(one.us for one in every))} in all: {', '.join(parts)}" if parts else ""


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
        _share(found.exposed_us, drawn_us(sheet.plan)),
        tuple(_why(sheet, found)),
    )


def _share(us: float, whole_us: float) -> str:
    return share_text(us, whole_us) if us >= LEAST * whole_us else f"under {share_text(LEAST, 1.0)}"


def _why(sheet: Sheet, found: CollectiveBar) -> Iterator[str]:
    for _, text in (*why_then(sheet, found, cost=False), *together(sheet, found)):
        yield text
