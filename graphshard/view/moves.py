"""What moved between two plans of one model: `moves(before, after)`.

Out come `Move`s in the order of the schedule: what stays gathered, what travels together, what is
computed again, and each collective that is issued, or waited for, at another place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphshard.schedule.plan import Activation, Direction, Plan, Schedule, Step, StepKind
from graphshard.schedule.steps import ISSUE_OF, ISSUES

WORDS = {
    StepKind.GATHER_ISSUE: ("all-gather", "issued"),
    StepKind.GATHER_WAIT: ("all-gather", "awaited"),
    StepKind.REDUCE_ISSUE: ("reduce-scatter", "issued"),
    StepKind.REDUCE_WAIT: ("reduce-scatter", "awaited"),
    StepKind.ALL_REDUCE_ISSUE: ("all-reduce", "issued"),
    StepKind.ALL_REDUCE_WAIT: ("all-reduce", "awaited"),
    StepKind.OFFLOAD_ISSUE: ("offload", "issued"),
    StepKind.OFFLOAD_WAIT: ("offload", "awaited"),
    StepKind.RELOAD_ISSUE: ("reload", "issued"),
    StepKind.RELOAD_WAIT: ("reload", "awaited"),
}

STAYS = {
    "kept": "kept gathered until backward",
    "on node": "held until backward by the ranks of each node",
    "resharded": "resharded after forward",
}

# A communication step of a direction, by the names of its groups.
Key = tuple[StepKind, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MoveRow:
    """groups: FQNs. what: a key of STAYS, "recomputed", "offloaded", "not" one of these, "split",
    "together", "alone", "earlier" or "later"; the last two with `num_ops`: over so many ops."""

    what: str
    groups: tuple[str, ...]
    text: str
    direction: Direction | None = None
    num_ops: int = 0


def moves(before: Plan, after: Plan) -> Iterator[MoveRow]:
    """Nothing for two plans with equal schedules."""
    yield from _kept(before, after)
    yield from _recomputed(before, after)
    for ours, theirs in zip(before.schedules, after.schedules, strict=True):
        old, new = _places(before, ours), _places(after, theirs)
        yield from _regrouped(ours.direction, old, new)
        if _num_ops(ours) == _num_ops(theirs):
            yield from _moved(ours.direction, old, new)


def _kept(before: Plan, after: Plan) -> Iterator[MoveRow]:
    """From forward to backward."""
    old, new = _stays(before), _stays(after)
    for group in before.groups:
        is_now = new.get(group.fqn, "resharded")
        if is_now != old.get(group.fqn, "resharded"):
            yield MoveRow(is_now, (group.fqn,), STAYS[is_now])


def _stays(plan: Plan) -> dict[str, str]:
    """What is left of each group until backward, by FQN; nothing of those that are missing."""
    groups = {group.id: group.fqn for group in plan.groups}
    released = [s for s in plan.forward.of_kind(StepKind.RELEASE) if s.kept or s.on_node]
    return {groups[g]: "kept" if s.kept else "on node" for s in released for g in s.groups}


def _recomputed(before: Plan, after: Plan) -> Iterator[MoveRow]:
    was, now = before.recompute, after.recompute
    again, away = "computed again in backward", "held by the host until backward"
    yield from _of_activations("recomputed", again, was.activations, now.activations)
    yield from _of_activations("offloaded", away, was.offloaded, now.offloaded)


def _of_activations(
    word: str, what: str, before: Sequence[Activation], after: Sequence[Activation]
) -> Iterator[MoveRow]:
    was, now = _numbers(before), _numbers(after)
    for fqn in dict.fromkeys((*now, *was)):
        more, fewer = now[fqn] - was[fqn], was[fqn] - now[fqn]
        if more:
            part = "more of it is " if was[fqn] else ""
            yield MoveRow(word, (fqn,), f"{part}{what}")
        if fewer:
            part = "some of it is " if now[fqn] else ""
            yield MoveRow(f"not {word}", (fqn,), f"{part}no longer {what}")


def _numbers(activations: Sequence[Activation]) -> Mapping[str, set[int]]:
    """By FQN."""
    found: dict[str, set[int]] = defaultdict(set)
    for one in activations:
        found[one.group].add(one.number)
    return found


def _places(plan: Plan, schedule: Schedule) -> dict[Key, int]:
    """Communication step -> ops that come before it. What is still gathered moves nothing."""
    fqns = {group.id: group.fqn for group in plan.groups}
    done, found = 0, {}
    for step in schedule.steps:
        if step.kind is StepKind.COMPUTE:
            done = step.stop
        elif (step.kind in ISSUES or step.kind in ISSUE_OF) and not step.kept:
            found[_key(step, fqns)] = done
    return found


def _key(step: Step, fqns: Mapping[int, str]) -> Key:
    return step.kind, tuple(fqns[group] for group in step.groups), step.params


def _num_ops(schedule: Schedule) -> int:
    return max((step.stop for step in schedule.steps), default=0)


def _regrouped(
    direction: Direction, old: Mapping[Key, int], new: Mapping[Key, int]
) -> Iterator[MoveRow]:
    for kind, groups, params in new:
        if kind not in ISSUES or (kind, groups, params) in old:
            continue
        name = f"{WORDS[kind][0]} in {direction}"
        if len(groups) > 1:
            yield MoveRow("together", groups, f"{name}: one for all", direction)
        elif params:
            places = ", ".join(map(str, params))
            yield MoveRow("split", groups, f"{name}: one for parameters {places}", direction)
        elif any(k is kind and groups[0] in others for k, others, _ in old):
            yield MoveRow("alone", groups, f"{name}: alone, not split or with others", direction)


def _moved(
    direction: Direction, old: Mapping[Key, int], new: Mapping[Key, int]
) -> Iterator[MoveRow]:
    """Issues of what both have; waits of reductions, since a gather's stands where it is used."""
    for key, place in new.items():
        kind, groups, _ = key
        if key not in old or kind is StepKind.GATHER_WAIT or place == old[key]:
            continue
        num_ops = abs(place - old[key])
        way = "earlier" if place < old[key] else "later"
        noun, verb = WORDS[kind]
        text = f"{noun} in {direction}: {verb} {num_ops:,} op{'s'[: num_ops != 1]} {way}"
        yield MoveRow(way, groups, text, direction, num_ops)
