"""`graphshard show`: a plan as plain text, 80 columns wide.

First what it takes and gains, then the collectives of each direction, then its groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, zip_longest

from graphshard.schedule.plan import Direction, Plan, Schedule, StepKind
from graphshard.view.brief import LABEL_WIDTH, brief_lines, title_line
from graphshard.view.names import shown
from graphshard.view.text import (
    WIDTH,
    bytes_text,
    group_name,
    group_numel,
    step_text,
)
from graphshard.view.timeline import Timeline, timeline

# Title and width of each column of numbers; the name has what is left.
GROUP_COLUMNS = {
    "params": 7,
    "numel": 15,
    "gathered": 11,
    "gathers": 9,
    "after forward": 15,
}
DIRECTION_WIDTH = 12
NUMBER = re.compile(r"\d+")


def summary_lines(plan: Plan) -> str:
    """The headline, collectives of each direction, gathered peak, groups; neighbours alike share a
    row."""
    plan = shown(plan)
    rows = timeline(plan)
    lines = [title_line(plan), "", *brief_lines(plan.estimate, plan.measured), ""]
    lines += _directions(plan)
    lines += ["", *_peak_lines(plan, rows), ""]
    lines += _group_table(plan)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _directions(plan: Plan) -> Iterator[str]:
    widths = [DIRECTION_WIDTH] * (len(plan.schedules) + 1)
    yield _cells("", (*(s.direction.value for s in plan.schedules), "step"), widths)
    columns = [_direction_numbers(s) for s in plan.schedules]
    titles = ("all-gathers", "kept, no all-gather", "reduce-scatters", "all-reduces", "ops")
    for index, name in enumerate(titles):
        numbers = [column[index] for column in columns]
        if name == "all-reduces" and not any(numbers):  # only replicas have some
            continue
        yield _cells(name, (f"{n:,}" for n in (*numbers, sum(numbers))), widths)


def _direction_numbers(schedule: Schedule) -> tuple[int, ...]:
    kept = sum(s.kept for s in schedule.of_kind(StepKind.GATHER_ISSUE))
    ops = sum(s.stop - s.start for s in schedule.of_kind(StepKind.COMPUTE))
    reductions = schedule.num_reduce_scatters, schedule.num_all_reduces
    return schedule.num_all_gathers, kept, *reductions, ops


def _peak_lines(plan: Plan, rows: Timeline) -> Iterator[str]:
    yield f"{'gathered'.ljust(LABEL_WIDTH)}at most {bytes_text(plan.gathered_peak_bytes())}"
    if rows.peak_step is not None:
        names = {g.id: group_name(g) for g in plan.groups}
        where = f"step {rows.peak_step} ({rows.direction_of(rows.peak_step)})"
        yield f"{' ' * LABEL_WIDTH}at {where}: {step_text(rows.steps[rows.peak_step], names)}"


@dataclass(frozen=True, slots=True)
class _GroupRow:
    """A row of the table. Neighbours with the same `pattern` and `cells` are folded into one."""

    name: str
    pattern: str
    cells: tuple[str, ...]


def _group_table(plan: Plan) -> Iterator[str]:
    widths = list(GROUP_COLUMNS.values())
    yield _cells("group", GROUP_COLUMNS, widths)
    for _, same in groupby(_group_rows(plan), key=lambda r: (r.pattern, r.cells)):
        rows = list(same)
        if len(rows) > 2:
            rows = [replace(rows[0], name=f"{_span_name(rows)} ({len(rows)})")]
        yield from (_cells(row.name, row.cells, widths) for row in rows)


def _span_name(rows: Sequence[_GroupRow]) -> str:
    """ "layers.0" to "layers.7", which have one pattern, are "layers.0-7"."""
    numbers = zip(*(NUMBER.findall(row.name) for row in (rows[0], rows[-1])), strict=True)
    spans = [first if first == last else f"{first}-{last}" for first, last in numbers]
    return "".join(
        chain.from_iterable(zip_longest(rows[0].pattern.split("*"), spans, fillvalue=""))
    )


def _group_rows(plan: Plan) -> Iterator[_GroupRow]:
    gathers = {g.id: [0, 0] for g in plan.groups}
    for schedule in plan.schedules:
        for step in schedule.of_kind(StepKind.GATHER_ISSUE):
            for group in () if step.kept else step.groups:
                gathers[group][schedule.direction is Direction.BACKWARD] += 1
    after = dict(_after_forward(plan))
    for info in plan.groups:
        cells = (
            f"{len(info.params):,}",
            f"{group_numel(info):,}",
            bytes_text(info.gathered_bytes),
            " + ".join(map(str, gathers[info.id][: len(plan.schedules)])),
            after.get(info.id, "-"),
        )
        name = group_name(info)
        yield _GroupRow(name, NUMBER.sub("*", name.replace("*", "?")), cells)


def _after_forward(plan: Plan) -> Iterator[tuple[int, str]]:
    """What becomes of each group that is gathered when forward ends with it."""
    for step in plan.forward.of_kind(StepKind.RELEASE):
        word = "on each node" if step.on_node else "kept" if step.kept else "resharded"
        yield from ((group, word) for group in step.groups)


def _cells(name: str, cells: Iterable[str], widths: Sequence[int]) -> str:
    room = WIDTH - sum(GROUP_COLUMNS.values())
    if len(name) > room:
        # The end of an FQN tells more than its beginning.
        name = "..." + name[len(name) - room + 3 :].lstrip(".")
    pairs = zip(cells, widths, strict=True)
    return name.ljust(room) + "".join(cell.rjust(width) for cell, width in pairs)
