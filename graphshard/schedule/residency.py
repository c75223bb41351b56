"""When each group is gathered, and how many bytes of parameters that is, step by step.

In come groups and the schedules of both directions. Steps are counted through forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.groups import GroupInfo
from graphshard.schedule.steps import Schedule, StepKind


@dataclass(frozen=True, slots=True)
class Residency:
    """Group `group` holds gathered bytes from step `start` up to and including step `stop`."""

    group: int
    start: int
    stop: int
    kept: bool


def residency(schedules: Sequence[Schedule]) -> Iterator[Residency]:
    steps = [step for schedule in schedules for step in schedule.steps]
    opened: dict[int, tuple[int, bool]] = {}
    for index, step in enumerate(steps):
        if step.group is None:
            continue
        if step.kind is StepKind.GATHER_ISSUE:
            for group in step.groups:
                opened.setdefault(group, (index, False))
        elif step.kind is StepKind.RELEASE:
            start, _ = opened.get(step.group, (index, False))
            if step.kept:
                opened[step.group] = (start, True)
            else:
                _, kept = opened.pop(step.group, (index, False))
                yield Residency(step.group, start, index, kept)
    for group, (start, kept) in opened.items():
        yield Residency(group, start, len(steps) - 1, kept)


def gathered_bytes_by_step(groups: Sequence[GroupInfo], schedules: Sequence[Schedule]) -> list[int]:
    """Gathered parameter bytes alive during each step, forward steps then backward steps.

    What a gather carries counts from its issue to its group's release. At its wait the bucket and
    the parameters copied out of it are alive together, so that step counts it twice (unless it was
    kept, is in place, or has one rank only). Where groups stay gathered between micro-steps, a step
    shows the larger of what it has in the first micro-step and in a later one.
    """
    stays = {g.id: g.room_bytes() for g in groups if g.between_micro_steps}
    first = _alive_bytes(groups, schedules, {})
    return list(map(max, first, _alive_bytes(groups, schedules, stays))) if stays else first


def _alive_bytes(
    groups: Sequence[GroupInfo], schedules: Sequence[Schedule], stays: dict[int, int]
) -> list[int]:
    """stays: bytes of groups that are gathered from the start to the end."""
    by_id = {g.id: g for g in groups}
    held: dict[int, int] = dict(stays)
    alive = []
    for step in (step for schedule in schedules for step in schedule.steps):
        bucket = 0
        for group in (by_id[number] for number in step.groups if number not in stays):
            carried = group.room_bytes(step.params)
            if step.kind is StepKind.GATHER_ISSUE:
                held[group.id] = carried + (0 if step.kept else held.get(group.id, 0))
            elif step.kind is StepKind.GATHER_WAIT and not step.kept and _has_bucket(group):
                bucket += carried
        alive.append(sum(held.values()) + bucket)
        if step.kind is StepKind.RELEASE and not step.kept and (group_id := step.group) is not None:
            held[group_id] = stays.get(group_id, 0)
    return alive


def _has_bucket(group: GroupInfo) -> bool:
    return group.world_size > 1 and not group.gathers_in_place
