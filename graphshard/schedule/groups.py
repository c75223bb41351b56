"""What a plan knows of `fully_shard` groups, as plain numbers, and what a collective moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from graphshard.files.decode import Count, Positive
from graphshard.schedule.steps import COLLECTIVES, Schedule, Step, StepKind


class Reshard(StrEnum):
    """Who decides what stays gathered from forward to backward."""

    FSDP2 = "fsdp2"  # `reshard_after_forward`, FSDP2's default included
    OPEN = "open"  # the planner, as long as the user leaves it to FSDP2
    AUTO = "auto"  # the planner, whatever is set


@dataclass(frozen=True, slots=True)
class ExtensionInfo:
    """Of a parameter whose all-gather extensions say what travels and what is made of it.

    held_bytes: while it is gathered, what arrived and what was made of that. grad_numel,
    grad_bytes: of its unsharded gradient, with FSDP2's padding.
    """

    held_bytes: Count
    grad_numel: Count
    grad_bytes: Count


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter of a group. `shape` is the unsharded shape; `dtype` is what compute sees.
    gathered_bytes: what travels, of all ranks."""

    fqn: str
    shape: tuple[Count, ...]
    dtype: str
    trainable: bool
    gathered_bytes: Count
    extension: ExtensionInfo | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def wire_dtype(self) -> str:
        return self.dtype if self.extension is None else "uint8"

    @property
    def held_bytes(self) -> int:
        """While it is gathered."""
        return self.gathered_bytes if self.extension is None else self.extension.held_bytes

    @property
    def grad_bytes(self) -> int:
        """Of its unsharded gradient."""
        return self.gathered_bytes if self.extension is None else self.extension.grad_bytes


@dataclass(frozen=True, slots=True, order=True)
class Activation:
    """What one op of a group's forward saves for backward. number: the place of the op among those
    that do, in forward's order (`graphshard.pricing.recompute`). group: FQN."""

    group: str
    number: Count


@dataclass(frozen=True, slots=True)
class Origin:
    """What makes an activation. op: without its namespace, as "mm". module: the innermost one that
    runs it, by its name in the group's module; empty if that is unknown or the module itself."""

    op: str
    module: str = ""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What becomes of activations until backward because the planner chose so.

    activations: backward computes them again. offloaded: the host holds them.
    checkpoints: regions of `torch.utils.checkpoint` in the graph whose policy leaves it open what
    is; 0 also where they were not counted. replaced: the plan decides what these regions save and
    compute again.
    """

    activations: tuple[Activation, ...] = ()
    checkpoints: Count = 0
    replaced: bool = False
    offloaded: tuple[Activation, ...] = ()

    @property
    def changes_graph(self) -> bool:
        """Something is computed again or offloaded."""
        return bool(self.activations or self.offloaded)

    def renamed(self, name_of: Callable[[str], str]) -> Recomputed:
        """name_of: from a group's FQN to its new one."""

        def all_of(found: Sequence[Activation]) -> tuple[Activation, ...]:
            return tuple(replace(one, group=name_of(one.group)) for one in found)

        activations, offloaded = all_of(self.activations), all_of(self.offloaded)
        return replace(self, activations=activations, offloaded=offloaded)


NOTHING_RECOMPUTED = Recomputed()


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One `fully_shard` group. `gathered_bytes` counts FSDP2's padding of uneven shards.

    resharded_by: who says whether it stays gathered until backward. between_micro_steps: it stays
    gathered after backward too, as long as gradients are not synchronised.
    reduce_dtype, reduce_bytes: of the gradients on the wire, all trainable parameters together.
    offloaded_bytes: of its activations, what the host holds from forward to backward.
    gathers_in_place: straight into the parameters' memory, without a bucket; on one rank compute
    reads the shards themselves. replicated: its reduction is followed by an all-reduce over
    `replicas` ranks (1 in plans of before that was written down).
    """

    id: Count
    fqn: str
    params: tuple[ParamInfo, ...]
    world_size: Positive
    reshard_after_forward: bool
    gathered_bytes: Count
    resharded_by: Reshard = Reshard.FSDP2
    between_micro_steps: bool = False
    gathers_in_place: bool = False
    reduce_dtype: str = ""
    reduce_bytes: Count = 0
    replicated: bool = False
    offloaded_bytes: Count = 0
    replicas: Positive = 1

    @property
    def trainable(self) -> bool:
        return any(p.trainable for p in self.params)

    def room_bytes(self, params: Sequence[int] = ()) -> int:
        """What `params` (empty: all) take in memory while they are gathered."""
        if self.world_size == 1 and self.gathers_in_place:
            return 0
        return sum(self.params[place].held_bytes for place in params or range(len(self.params)))


def size_bytes(step: Step, groups: Sequence[GroupInfo]) -> int:
    """What the collective that `step` issues for `groups` moves: the bucket of all ranks' parts.
    Of an all-reduce, this rank's part; of a copy to or from the host, what this rank copies."""
    if step.is_copy:
        return sum(g.offloaded_bytes for g in groups)
    if step.kind is StepKind.REDUCE_ISSUE:
        return sum(_reduced_bytes(g, step.params) for g in groups)
    if step.kind is StepKind.ALL_REDUCE_ISSUE:
        return sum(g.reduce_bytes // g.world_size for g in groups)
    params = (g.params[p] for g in groups for p in step.params or range(len(g.params)))
    return sum(p.gathered_bytes for p in params)


def _reduced_bytes(group: GroupInfo, params: tuple[int, ...]) -> int:
    """The share of `params` (empty: all) in the group's gradients on the wire."""
    trainable = sum(p.grad_bytes for p in group.params if p.trainable)
    chosen = (group.params[place] for place in params or range(len(group.params)))
    return (
        group.reduce_bytes * sum(p.grad_bytes for p in chosen if p.trainable) // max(1, trainable)
    )


def received_bytes(groups: Sequence[GroupInfo], schedules: Sequence[Schedule]) -> int:
    """What a rank receives in `schedules`: (N-1)/N of each collective's bucket, as in a ring, and
    twice that of an all-reduce."""
    by_id = {g.id: g for g in groups}
    steps = (step for schedule in schedules for step in schedule.steps)
    issues = (s for s in steps if s.kind in COLLECTIVES)
    total = 0
    for step in issues:
        own = [by_id[number] for number in step.groups]
        all_reduces = step.kind is StepKind.ALL_REDUCE_ISSUE
        ranks = own[0].replicas if all_reduces else own[0].world_size
        rounds = 2 if all_reduces else 1
        total += 0 if step.kept else rounds * size_bytes(step, own) * (ranks - 1) // ranks
    return total
