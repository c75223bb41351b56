"""The words for bytes, steps, lanes and groups that all views share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from graphshard.schedule.plan import (
    GroupInfo,
    Lane,
    Plan,
    Step,
    StepKind,
    Summary,
    numel,
)

WIDTH = 80
ROOT = "(root)"  # the group of the model's own fully_shard call

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
    return group.fqn or ROOT


def group_names(plan: Plan) -> dict[int, str]:
    return {group.id: group_name(group) for group in plan.groups}


def group_numel(group: GroupInfo) -> int:
    """How many elements the parameters of the group have together, unsharded."""
    return sum(numel(p.shape) for p in group.params)


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


def collectives_text(summary: Summary) -> str:
    """All-reduces are those over replicas, which few plans have."""
    texts = [f"{summary.all_gathers:,} all-gathers", f"{summary.reduce_scatters:,} reduce-scatters"]
    if not summary.all_reduces:
        return " and ".join(texts)
    return f"{', '.join(texts)} and {summary.all_reduces:,} all-reduces"


def ranks_of(issue: Step, group: GroupInfo) -> int:
    """How many ranks take part in the collective of `group` that `issue` starts."""
    return group.replicas if issue.lane is Lane.ALL_REDUCE else group.world_size


def ranks_text(plan: Plan) -> str:
    sizes = sorted({g.world_size for g in plan.groups})
    if not sizes:
        return "no groups"
    return " and ".join(map(str, sizes)) + (" rank" if sizes == [1] else " ranks")
