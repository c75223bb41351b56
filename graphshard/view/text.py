"""A plan as plain text, 92 columns wide; and the words for bytes, steps and groups of all views."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, zip_longest
from typing import Any

from graphshard.schedule.plan import (
    Direction,
    GroupInfo,
    Lane,
    Plan,
    Schedule,
    Step,
    StepKind,
    numel,
)
from graphshard.view.names import shown
from graphshard.view.optimizer import step_line
from graphshard.view.timeline import Timeline, timeline

WIDTH = 92
# Title and width of each column of numbers; the name has what is left.
GROUP_COLUMNS = {
    "params": 8,
    "numel": 15,
    "shapes": 8,
    "gathered": 11,
    "gathers": 9,
    "reshard": 9,
}
DIRECTION_WIDTH = 12
NUMBER = re.compile(r"\d+")

LANE_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.ALL_GATHER: "all-gather",
    Lane.REDUCE_SCATTER: "reduce-scatter",
    Lane.ALL_REDUCE: "all-reduce",
    Lane.OFFLOAD: "offload",
    Lane.RELOAD: "reload",
}
# What a collective is drawn as.
MARK_KINDS = {
    Lane.ALL_GATHER: "gather",
    Lane.REDUCE_SCATTER: "reduce",
    Lane.ALL_REDUCE: "all-reduce",
    Lane.OFFLOAD: "offload",
    Lane.RELOAD: "offload",
}
STEP_WORDS = {
    StepKind.COMPUTE: "compute",
    StepKind.GATHER_ISSUE: "issue all-gather",
    StepKind.GATHER_WAIT: "wait for all-gather",
    StepKind.RELEASE: "release",
    StepKind.REDUCE_ISSUE: "issue reduce-scatter",
    StepKind.REDUCE_WAIT: "wait for reduce-scatter",
    StepKind.ALL_REDUCE_ISSUE: "issue all-reduce",
    StepKind.ALL_REDUCE_WAIT: "wait for all-reduce",
    StepKind.OFFLOAD_ISSUE: "issue offload",
    StepKind.OFFLOAD_WAIT: "wait for offload",
    StepKind.RELOAD_ISSUE: "issue reload",
    StepKind.RELOAD_WAIT: "wait for reload",
}


def lane_names(carried: Iterable[tuple[int, Lane]]) -> dict[int, str]:
    """Number of a lane -> its name, by what runs on it; lanes that carry the same are numbered.

    carried: lane and kind of each collective.
    """
    kinds: dict[int, list[str]] = defaultdict(list)
    for lane, kind in carried:
        kinds[lane].append(LANE_WORDS[kind])
    texts = {lane: " + ".join(sorted(dict.fromkeys(kinds[lane]))) for lane in sorted(kinds)}
    alike = list(texts.values())
    return {
        lane: text if alike.count(text) == 1 else f"{text} {alike[: place + 1].count(text)}"
        for place, (lane, text) in enumerate(texts.items())
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


def group_names(plan: Plan) -> dict[int, str]:
    return {group.id: group_name(group) for group in plan.groups}


def group_numel(group: GroupInfo) -> int:
    """How many elements the parameters of the group have together, unsharded."""
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
    if step.on_node and step.kind is StepKind.RELEASE:
        words = "keep on each node a shard of"
    on_node = " on each node" if step.on_node and step.kind is not StepKind.RELEASE else ""
    return f"{words} {'' if step.group is None else names[step.group]}{on_node}".rstrip()


def collectives_text(summary: Mapping[str, Any]) -> str:
    """summary: `Plan.summary()`. All-reduces are those over replicas, which few plans have."""
    kinds = ("all_gathers", "all-gathers"), ("reduce_scatters", "reduce-scatters")
    texts = [f"{summary[key]:,} {noun}" for key, noun in kinds]
    if not summary["all_reduces"]:
        return " and ".join(texts)
    return f"{', '.join(texts)} and {summary['all_reduces']:,} all-reduces"


def ranks_of(issue: Step, group: GroupInfo) -> int:
    """How many ranks take part in the collective of `group` that `issue` starts."""
    return group.replicas if issue.lane is Lane.ALL_REDUCE else group.world_size


def ranks_text(plan: Plan) -> str:
    sizes = sorted({g.world_size for g in plan.groups})
    if not sizes:
        return "no groups"
    return " and ".join(map(str, sizes)) + (" rank" if sizes == [1] else " ranks")


def summary_lines(plan: Plan) -> str:
    """Plan, collectives of each direction, gathered peak, the step's time if it is known, groups;
    neighbours alike share a row."""
    plan = shown(plan)
    rows = timeline(plan)
    lines = [f"{plan.name}  (torch {plan.torch_version}, {ranks_text(plan)})", ""]
    lines += _directions(plan)
    lines += ["", _peak_line(plan, rows)]
    if plan.estimate is not None:
        lines.append(step_line(plan.estimate))
    lines.append("")
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
            if step.group is not None and not step.kept:
                gathers[step.group][schedule.direction is Direction.BACKWARD] += 1
    for group in plan.groups:
        cells = (
            f"{len(group.params):,}",
            f"{group_numel(group):,}",
            f"{group_shapes(group):,}",
            bytes_text(group.gathered_bytes),
            " + ".join(map(str, gathers[group.id][: len(plan.schedules)])),
            "yes" if group.reshard_after_forward else "no",
        )
        name = group_name(group)
        yield _GroupRow(name, NUMBER.sub("*", name.replace("*", "?")), cells)


def _cells(name: str, cells: Iterable[str], widths: Sequence[int]) -> str:
    room = WIDTH - sum(GROUP_COLUMNS.values())
    if len(name) > room:
        # The end of an FQN tells more than its beginning.
        name = "..." + name[len(name) - room + 3 :].lstrip(".")
    pairs = zip(cells, widths, strict=True)
    return name.ljust(room) + "".join(cell.rjust(width) for cell, width in pairs)
