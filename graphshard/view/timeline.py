"""From a `Plan` to the rows of a picture: lanes, residency, gathered bytes, one shared axis.

The axis is program order: the forward steps followed by the backward steps, numbered from 0, as
in `schedule.residency`. Nothing here is a time. Every `first` and `last` is a step
index and inclusive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graphshard.schedule.plan import (
    Direction,
    GroupInfo,
    Lane,
    Plan,
    Step,
    StepKind,
)
from graphshard.schedule.steps import WAIT_OF

# Share of the axis given to the steps that are not compute, so that a communication step stays
# visible next to compute steps of thousands of ops.
POINT_SHARE = 0.25
# Lanes that every picture has.
ALWAYS = (Lane.COMPUTE, Lane.ALL_GATHER, Lane.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class LaneSegment:
    """One bar of a lane, over the steps `first` to `last`.

    Compute has `num_ops` and no group; the rest has a group and no ops. `row` separates segments
    of a lane that overlap. `kept` marks a gather that the plan expects to find still gathered:
    no collective runs, and the segment covers the wait alone.
    """

    lane: Lane
    direction: Direction
    first: int
    last: int
    group: int | None = None
    num_ops: int = 0
    kept: bool = False
    awaited: bool = True
    row: int = 0


@dataclass(frozen=True, slots=True)
class LaneRows:
    """One in-order queue: segments in order of `first`, on `depth` rows (at least one)."""

    lane: Lane
    depth: int
    segments: tuple[LaneSegment, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment in which a group is gathered. `kept_from`: the forward release that keeps it.

    Not `released`: the plan ends with the group still gathered.
    """

    first: int
    last: int
    kept_from: int | None
    released: bool


@dataclass(frozen=True, slots=True)
class ResidencyRow:
    """The segments in which one group is gathered; empty if the plan never gathers it."""

    group: GroupInfo
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything the picture shows.

    Step i lies between `edges[i]` and `edges[i + 1]`; `divider` is the first backward step (None
    without a backward). `peak_step` is the first step at the peak (None for an empty plan).
    """

    steps: tuple[Step, ...]
    edges: tuple[float, ...]
    divider: int | None
    lanes: tuple[LaneRows, ...]
    residency: tuple[ResidencyRow, ...]
    gathered_bytes: tuple[int, ...]
    peak_step: int | None

    def direction_of(self, index: int) -> Direction:
        backward = self.divider is not None and index >= self.divider
        return Direction.BACKWARD if backward else Direction.FORWARD


def timeline(plan: Plan) -> Timeline:
    """The rows of `plan`. Equal plans give equal timelines."""
    steps = tuple(step for schedule in plan.schedules for step in schedule.steps)
    curve = tuple(plan.gathered_bytes_by_step())
    return Timeline(
        steps=steps,
        edges=axis_edges(steps),
        divider=None if plan.backward is None else len(plan.forward.steps),
        lanes=lane_rows(plan),
        residency=residency_rows(plan),
        gathered_bytes=curve,
        peak_step=curve.index(max(curve)) if curve else None,
    )


def axis_edges(steps: Sequence[Step]) -> tuple[float, ...]:
    """Where each step begins, then where the last one ends; 0 to 1 unless there are no steps.

    A compute step is as wide as its number of ops; all other steps share `POINT_SHARE` equally.
    """
    num_ops = sum(_num_ops(s) for s in steps)
    num_points = sum(s.kind is not StepKind.COMPUTE for s in steps)
    point = 1.0
    if num_ops and num_points:
        point = num_ops * POINT_SHARE / (1 - POINT_SHARE) / num_points
    widths = (float(_num_ops(s)) if s.kind is StepKind.COMPUTE else point for s in steps)
    edges = tuple(accumulate(widths, initial=0.0))
    return tuple(edge / edges[-1] for edge in edges) if edges[-1] else edges


def lane_rows(plan: Plan) -> tuple[LaneRows, ...]:
    """Top to bottom: compute, all-gather, reduce-scatter; all-reduces and copies if there are."""
    spans: dict[Lane, list[LaneSegment]] = {lane: [] for lane in Lane}
    offset = 0
    for schedule in plan.schedules:
        numbered = list(enumerate(schedule.steps, start=offset))
        offset += len(numbered)
        spans[Lane.COMPUTE].extend(_compute(schedule.direction, numbered))
        for issue in WAIT_OF:
            found = _communication(schedule.direction, numbered, issue)
            spans[Step(issue).lane].extend(found)
    return tuple(_stack(lane, own) for lane, own in spans.items() if own or lane in ALWAYS)


def computing_groups(steps: Iterable[Step]) -> list[int | None]:
    """The group inside which each step computes: of those waited for and not released, the last."""
    inside: list[int] = []
    found: list[int | None] = []
    for step in steps:
        if step.kind is StepKind.GATHER_WAIT:
            inside += [group for group in reversed(step.groups) if group not in inside]
        elif step.kind is StepKind.RELEASE and step.group in inside:
            inside.remove(step.group)
        found.append(inside[-1] if inside else None)
    return found


def residency_rows(plan: Plan) -> tuple[ResidencyRow, ...]:
    """One row per group, in the plan's order of groups."""
    steps = [step for schedule in plan.schedules for step in schedule.steps]
    bars: dict[int, list[Bar]] = defaultdict(list)
    for span in sorted(plan.residency(), key=lambda r: (r.group, r.start)):
        inside = range(span.start, span.stop + 1)
        releases = [
            i for i in inside if steps[i].kind is StepKind.RELEASE and steps[i].group == span.group
        ]
        kept_from = next((i for i in releases if steps[i].kept), None)
        released = any(not steps[i].kept for i in releases)
        bars[span.group].append(Bar(span.start, span.stop, kept_from, released))
    return tuple(ResidencyRow(group, tuple(bars[group.id])) for group in plan.groups)


def _num_ops(step: Step) -> int:
    return max(step.stop - step.start, 0) if step.kind is StepKind.COMPUTE else 0


def _compute(direction: Direction, numbered: Iterable[tuple[int, Step]]) -> Iterator[LaneSegment]:
    for index, step in numbered:
        if step.kind is StepKind.COMPUTE:
            yield LaneSegment(Lane.COMPUTE, direction, index, index, num_ops=_num_ops(step))


def _communication(
    direction: Direction, numbered: Sequence[tuple[int, Step]], issue: StepKind
) -> Iterator[LaneSegment]:
    """One segment per issue, up to its next wait, or to the direction's last step."""
    waits: dict[tuple[object, ...], deque[int]] = defaultdict(deque)
    for index, step in numbered:
        if step.kind is WAIT_OF[issue]:
            waits[step.groups, step.params].append(index)
    for index, step in numbered:
        if step.kind is not issue:
            continue
        queue = waits[step.groups, step.params]
        while queue and queue[0] < index:  # a wait without an issue: the verifier's business
            queue.popleft()
        last = queue.popleft() if queue else None
        yield LaneSegment(
            lane=step.lane,
            direction=direction,
            first=last if step.kept and last is not None else index,
            last=numbered[-1][0] if last is None else last,
            group=step.group,
            kept=step.kept,
            awaited=last is not None,
        )


def _stack(lane: Lane, segments: Iterable[LaneSegment]) -> LaneRows:
    """Each segment on the first row that is free at its first step."""
    busy_until: list[int] = []
    placed = []
    for segment in sorted(segments, key=lambda s: (s.first, s.last)):
        free = (r for r, last in enumerate(busy_until) if last < segment.first)
        row = next(free, len(busy_until))
        busy_until[row : row + 1] = [segment.last]
        placed.append(replace(segment, row=row))
    return LaneRows(lane, max(len(busy_until), 1), tuple(placed))
