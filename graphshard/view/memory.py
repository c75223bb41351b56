"""Memory over the axis: bytes by category, the budget, FSDP2's curve, and whose bytes the peak is.

In comes a `Sheet`; out comes a `Memory`. Without forecasts the only bytes known are those of
gathered parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.forecast import knows_memory
from graphshard.schedule.plan import Allocation, Category, Direction, Figures
from graphshard.schedule.reasons import ExchangeRate
from graphshard.view.axis import axis_of
from graphshard.view.cards import COMPUTED_AGAIN
from graphshard.view.marks import AxisMark
from graphshard.view.ranges import groups_text
from graphshard.view.reasons import reason_text
from graphshard.view.recomputed import recomputed_text
from graphshard.view.sheet import Sheet
from graphshard.view.text import bytes_text, step_text
from graphshard.view.timeline import computing_groups

# From the ground up: what never changes lies lowest.
STACK = {
    Category.SHARDED_PARAM: "param",
    Category.OPT_STATE: "opt",
    Category.SHARDED_GRAD: "grad",
    Category.BUFFER: "buffer",
    Category.INPUTS: "inputs",
    Category.ACTIVATION: "activation",
    Category.UNSHARDED_PARAM: "held",
    Category.ALL_GATHER: "gather",
    Category.UNSHARDED_GRAD: "fullgrad",
    Category.REDUCE_SCATTER: "reduce",
    Category.TEMP: "temp",
}
MOST_OWNERS = 12
# A budget further above the peaks than this would flatten the picture: it is said, not drawn.
MOST_ROOM = 1.6


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one category: from step `changes[i][0]` on there are `changes[i][1]`."""

    name: str
    kind: str
    at_peak: str
    changes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """layers: from the ground up. rival: places and bytes of FSDP2's own total, where it changes.
    ticks: bytes and their words; the last is the top of the picture. budget_bytes: None if it is
    not in the picture."""

    layers: tuple[Layer, ...]
    rival: tuple[tuple[float, int], ...]
    ticks: tuple[tuple[int, str], ...]
    budget_bytes: int | None
    peak_bytes: int
    peak_step: int | None
    peak: AxisMark | None


def memory_of(sheet: Sheet) -> MemoryChart:
    """The curves of the plan; empty for a plan without steps."""
    columns = _columns(sheet)
    at = _peak_step(sheet)
    rival = tuple(_rival(sheet))
    peak_bytes = sheet.alive_bytes[at] if at is not None else 0
    highest = max([peak_bytes, *(size for _, size in rival)])
    budget: int | None = sheet.plan.estimate.budget_bytes
    if budget is not None and budget > MOST_ROOM * highest:
        budget = None
    return MemoryChart(
        layers=tuple(
            Layer(name, kind, _size_at(sizes, at), tuple(_changes(sizes)))
            for name, kind, sizes in columns
        ),
        rival=rival,
        ticks=tuple(byte_ticks(max(highest, budget or 0))),
        budget_bytes=budget,
        peak_bytes=peak_bytes,
        peak_step=at,
        peak=None if at is None else _peak_mark(sheet, at),
    )


def _size_at(sizes: Sequence[int], step: int | None) -> str:
    return bytes_text(sizes[step]) if step is not None and sizes[step] else ""


def _columns(sheet: Sheet) -> list[tuple[str, str, Sequence[int]]]:
    if not sheet.by_category:
        return [("Unsharded Param", "held", sheet.alive_bytes)] if sheet.rows.steps else []
    found: list[tuple[str, str, Sequence[int]]] = []
    for category, kind in STACK.items():
        sizes: list[int] = []
        for forecast in sheet.plan.forecasts:
            own = dict(forecast.memory).get(category, (0,) * len(forecast.steps))
            sizes += own
        if any(sizes):
            found.append((str(category), kind, sizes))
    return found


def _changes(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    before = 0
    for step, size in enumerate(sizes):
        if size != before:
            yield step, size
        before = size


def _rival(sheet: Sheet) -> Iterator[tuple[float, int]]:
    """The bytes alive in FSDP2's own schedule, on its own times."""
    course = sheet.plan.fsdp2
    if course is None or not sheet.by_category or not knows_memory(course.forecasts):
        return
    axis = axis_of(course.schedules, course.forecasts)
    alive = [size for forecast in course.forecasts for size in forecast.alive_bytes]
    top = alive.index(max(alive)) if alive else None
    # A step that takes no time is no more than a spike: only that of the peak says something.
    lasting = [i for i in range(len(alive)) if axis.done[i] > axis.reached[i] or i == top]
    for place, size in _changes(alive[i] for i in lasting):
        yield axis.reached[lasting[place]], size
    if alive:
        yield axis.end, alive[-1]


def _peak_step(sheet: Sheet) -> int | None:
    """Where the estimate says; else the first step at which most is alive."""
    figures = _figures(sheet)
    if figures is not None and figures.peak_at is not None:
        backward = figures.peak_at.direction is Direction.BACKWARD
        return figures.peak_at.step + (len(sheet.plan.forward.steps) if backward else 0)
    alive = sheet.alive_bytes
    return alive.index(max(alive)) if alive else None


def _figures(sheet: Sheet) -> Figures | None:
    return sheet.plan.estimate.ours if sheet.plan.estimate and sheet.by_category else None


def _peak_mark(sheet: Sheet, at: int) -> AxisMark:
    figures = _figures(sheet)
    size = bytes_text(figures.peak_bytes if figures else sheet.alive_bytes[at])
    owners = _alike(figures.peak_owners if figures else _gathered(sheet, at))
    step = f"{step_text(sheet.rows.steps[at], dict(sheet.names))}"
    card = [("at", f"{sheet.place_text(sheet.axis.begun[at])}: {step}")]
    card += [_owner(sheet, alike) for alike in owners[:MOST_OWNERS]]
    rest = [owner.bytes for alike in owners[MOST_OWNERS:] for owner in alike]
    if rest:
        card.append((f"and {len(rest):,} more", bytes_text(sum(rest))))
    card += _exchange(sheet)
    place = sheet.axis.begun[at]
    title = f"peak {size}" + ("" if figures else " gathered")
    where = f", {peak_place(sheet, at)}"
    return AxisMark("peak", place, place, title, tuple(card), label=f"{title}{where}")


def peak_place(sheet: Sheet, at: int) -> str:
    """Inside which group, or right after which one: "backward of layers.31"."""
    owners = computing_groups(sheet.rows.steps[: at + 1])
    direction = sheet.rows.direction_of(at)
    if (group := owners[at]) is not None:
        return f"{direction} of {sheet.names[group]}"
    begun = [i for i in range(at) if sheet.rows.direction_of(i) is direction]
    before = next((one for i in reversed(begun) if (one := owners[i]) is not None), None)
    if before is None:  # the loss, say
        return f"{direction} outside of all groups"
    return f"{direction} right after {sheet.names[before]}"


def _exchange(sheet: Sheet) -> Iterator[tuple[str, str]]:
    """Time that is given for memory."""
    if again := recomputed_text(sheet.plan):
        yield COMPUTED_AGAIN, again
    for reason in sheet.plan.reasons:
        if isinstance(reason, ExchangeRate):
            yield "for memory", reason_text(reason, sheet.names)


def _gathered(sheet: Sheet, at: int) -> Iterator[Allocation]:
    """Without forecasts: the groups that are gathered then, largest first, and the bucket."""
    sizes = {g.id: g.room_bytes() for g in sheet.plan.groups}
    inside = [r.group for r in sheet.plan.residency() if r.start <= at <= r.stop]
    owned = sorted(dict.fromkeys(inside), key=lambda group: (-sizes[group], group))
    yield from (Allocation(Category.UNSHARDED_PARAM, sizes[group], group) for group in owned)
    bucket = sheet.alive_bytes[at] - sum(sizes[group] for group in owned)
    if bucket > 0:
        yield Allocation(Category.ALL_GATHER, bucket)


def _alike(owners: Iterable[Allocation]) -> list[list[Allocation]]:
    """Those that hold as much for one category are told together; the largest sum first."""
    found: dict[tuple[Category, int, bool], list[Allocation]] = defaultdict(list)
    for owner in owners:
        found[owner.category, owner.bytes, owner.group is None].append(owner)
    return sorted(found.values(), key=lambda alike: -sum(owner.bytes for owner in alike))


def _owner(sheet: Sheet, alike: Sequence[Allocation]) -> tuple[str, str]:
    first = alike[0]
    groups = sorted(owner.group for owner in alike if owner.group is not None)
    names = groups_text([sheet.names[group] for group in groups])
    size = bytes_text(sum(owner.bytes for owner in alike))
    each = f" ({bytes_text(first.bytes)} each)" if len(alike) > 1 else ""
    return str(first.category) + (names and f", {names}"), f"{size}{each}"


def byte_ticks(most: int) -> Iterator[tuple[int, str]]:
    """Zero and round numbers of bytes, at most five, the last at or above `most`."""
    tick = 1
    while tick * 4 < most:
        tick *= 2
    yield 0, "0"
    for n in range(1, 5):
        yield n * tick, bytes_text(n * tick)
        if n * tick >= most:
            return
