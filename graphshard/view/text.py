"""A plan as plain text, 92 columns wide; and the words for bytes, steps and groups of all views."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from graphshard.plan import Direction, GroupInfo, Plan, Schedule, Step, StepKind, numel
from graphshard.view.timeline import Timeline, timeline

WIDTH = 92
NUMBER_COLUMNS = ("params", "numbers", "gathered", "shapes", "gathers", "reshard")
NAME_WIDTH = WIDTH - 12 * len(NUMBER_COLUMNS)

STEP_WORDS = {
    StepKind.COMPUTE: "compute",
    StepKind.GATHER_ISSUE: "issue all-gather",
    StepKind.GATHER_WAIT: "wait for all-gather",
    StepKind.RELEASE: "release",
    StepKind.REDUCE_ISSUE: "issue reduce-scatter",
    StepKind.REDUCE_WAIT: "wait for reduce-scatter",
}


def bytes_text(count: int) -> str:
    """`count` bytes in the largest binary unit of which there is at least one: "3.2 MiB"."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"


def count_text(count: int, noun: str) -> str:
    """ "1 op", "2 ops"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def group_name(group: GroupInfo) -> str:
    return group.fqn or "(root)"


def group_numbers(group: GroupInfo) -> int:
    """How many numbers the group's parameters hold, unsharded."""
    return sum(numel(p.shape) for p in group.params)


def group_shapes(group: GroupInfo) -> int:
    """How many different shapes the group's parameters have."""
    return len({p.shape for p in group.params})


def step_text(step: Step, names: dict[int, str]) -> str:
    """What a step does, in words: "issue all-gather layers.3"."""
    if step.kind is StepKind.COMPUTE:
        return f"compute, {count_text(step.stop - step.start, 'op')}"
    words = STEP_WORDS[step.kind]
    if step.kept:
        words = "keep gathered" if step.kind is StepKind.RELEASE else "already gathered:"
    return f"{words} {'' if step.group is None else names[step.group]}".rstrip()


def ranks_text(plan: Plan) -> str:
    sizes = sorted({g.world_size for g in plan.groups})
    return " and ".join(map(str, sizes)) + (" rank" if sizes == [1] else " ranks")


def summary_lines(plan: Plan) -> str:
    """Plan, collectives of each direction, gathered peak, groups; neighbours alike share a row."""
    rows = timeline(plan)
    lines = [f"{plan.name}  (torch {plan.torch_version}, {ranks_text(plan)})", ""]
    lines += _directions(plan)
    lines += ["", _peak_line(plan, rows), ""]
    lines += _group_table(plan)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _directions(plan: Plan) -> Iterator[str]:
    yield _cells("", (*(s.direction.value for s in plan.schedules), "step"))
    columns = [_direction_numbers(s) for s in plan.schedules]
    for index, name in enumerate(("all-gathers", "kept, no all-gather", "reduce-scatters", "ops")):
        numbers = [column[index] for column in columns]
        yield _cells(name, (f"{n:,}" for n in (*numbers, sum(numbers))))


def _direction_numbers(schedule: Schedule) -> tuple[int, int, int, int]:
    kept = sum(s.kept for s in schedule.of_kind(StepKind.GATHER_ISSUE))
    ops = sum(s.stop - s.start for s in schedule.of_kind(StepKind.COMPUTE))
    return schedule.num_all_gathers, kept, schedule.num_reduce_scatters, ops


def _peak_line(plan: Plan, rows: Timeline) -> str:
    if rows.peak_step is None:
        return "gathered peak 0 B"
    names = {g.id: group_name(g) for g in plan.groups}
    where = f"step {rows.peak_step}, {rows.direction_of(rows.peak_step)}"
    step = step_text(rows.steps[rows.peak_step], names)
    return f"gathered peak {bytes_text(plan.gathered_peak_bytes())} at {where}: {step}"


@dataclass(frozen=True, slots=True)
class _GroupRow:
    """A row of the table. Neighbours with the same `pattern` and `cells` are folded into one."""

    name: str
    pattern: str
    cells: tuple[str, ...]


def _group_table(plan: Plan) -> Iterator[str]:
    yield _cells("group", NUMBER_COLUMNS)
    for _, same in groupby(_group_rows(plan), key=lambda r: (r.pattern, r.cells)):
        rows = list(same)
        first = rows[0]
        if len(rows) > 2:
            yield _cells(f"{first.pattern}  x {len(rows)}", first.cells)
        else:
            yield from (_cells(r.name, r.cells) for r in rows)


def _group_rows(plan: Plan) -> Iterator[_GroupRow]:
    gathers = {g.id: [0, 0] for g in plan.groups}
    for schedule in plan.schedules:
        for step in schedule.of_kind(StepKind.GATHER_ISSUE):
            if step.group is not None and not step.kept:
                gathers[step.group][schedule.direction is Direction.BACKWARD] += 1
    for group in plan.groups:
        cells = (
            f"{len(group.params):,}",
            f"{group_numbers(group):,}",
            bytes_text(group.gathered_bytes),
            f"{group_shapes(group):,}",
            " + ".join(map(str, gathers[group.id][: len(plan.schedules)])),
            "yes" if group.reshard_after_forward else "no",
        )
        name = group_name(group)
        yield _GroupRow(name, re.sub(r"\d+", "*", name), cells)


def _cells(name: str, cells: Iterable[str]) -> str:
    if len(name) >= NAME_WIDTH:
        # The end of an FQN tells more than its beginning.
        name = "..." + name[len(name) - NAME_WIDTH + 4 :]
    return name.ljust(NAME_WIDTH) + "".join(cell.rjust(12) for cell in cells)
