"""What the planner has to know of FSDP2's settings, meshes and sizes, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from graphshard.fsdp2.cpu_offload import offloads_to_cpu
from graphshard.fsdp2.extensions import plain_tensors
from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.node_group import (
    local_world_size,
    most_on_node,
    node_stride,
    ranks_on_node,
    replica_rows,
    shard_rows,
)
from graphshard.fsdp2.param import FsdpParam, hooks_of
from graphshard.fsdp2.separate_group import may_reduce_apart
from graphshard.fsdp2.state import State, is_root
from graphshard.schedule.plan import Direction


@dataclass(frozen=True, slots=True)
class TrainableShards:
    """What an optimizer steps on this rank."""

    bytes: int
    numel: int


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One group when it is planned.

    reshard: what the user gave as `reshard_after_forward`, None if left to FSDP2. ranks: over which
    it is sharded, at most `ranks_per_node` of them on one node. gather_lane, reduce_lane: names of
    process groups, the same on all ranks. trainable: of its shards. reduce_item_bytes: of one
    element of a gradient on the wire. regroups: its gathers may be merged and split. Prefetch
    lists: places of groups.
    in_place: the backend sends many tensors from where they are. clones: it has a copy of what it
    gathers or reduces meanwhile. None: whatever the machine's does.
    casts: what it gathers has another dtype than its shards.
    reduces_plainly: FSDP2's own reduce-scatter takes each gradient as it comes, without a cast.
    exact_sums: its sums have to be those of FSDP2, to the last bit. reduces_alone: nothing but the
    reduce-scatter is done to its gradients (no all-reduce, no hook). has_hooks: something runs as
    soon as a gradient is there (an optimizer in backward). may_reduce_apart: reductions may get a
    process group of their own. has_all_reduce_hook: FSDP2's, which may wait for ranks outside the
    mesh (torchft's replicas, say) that have a plan of their own. post_forward_ranks,
    post_forward_lane: the smaller mesh of an int `reshard_after_forward`; 0 and "" without one.
    node_ranks: of its ranks on one node, if a plan may have these hold it after forward; else 0.
    offloads_to_cpu: the host has shards, reduced gradients and optimizer, if the device has a host.
    replicas: ranks that all-reduce reduced gradients, at most `replicas_per_node` of them on one
    node, on all_reduce_lane; "": nothing is replicated. node_stride, replica_node_stride: of the
    ranks it is sharded over, and of the replicas, from one node of theirs to the next, in nodes.
    """

    reshard: bool | None
    is_root: bool
    ranks: int
    ranks_per_node: int
    gather_lane: str
    reduce_lane: str
    shard_bytes: int
    trainable: TrainableShards
    reduce_item_bytes: int
    kept_after_backward: bool = False
    regroups: bool = True
    in_place: bool | None = False
    clones: bool | None = False
    casts: bool = False
    reduces_plainly: bool = False
    exact_sums: bool = True
    reduces_alone: bool = False
    has_hooks: bool = False
    may_reduce_apart: bool = False
    has_all_reduce_hook: bool = False
    post_forward_ranks: int = 0
    post_forward_lane: str = ""
    node_ranks: int = 0
    offloads_to_cpu: bool = False
    forward_prefetch: tuple[int, ...] = ()
    backward_prefetch: tuple[int, ...] = ()
    replicas: int = 1
    replicas_per_node: int = 1
    all_reduce_lane: str = ""
    node_stride: int = 1
    replica_node_stride: int = 1

    def with_library(self, in_place: bool, *, clones: bool) -> GroupSettings:
        """With what the machine's library does, where no backend says it."""
        if self.in_place is not None:
            return self
        return replace(self, in_place=in_place, clones=clones)

    @property
    def gathers_in_place(self) -> bool:
        if self.ranks == 1:
            return self.regroups and not self.casts
        return bool(self.in_place) and self.regroups

    @property
    def reduces_in_place(self) -> bool:
        """More than two numbers are added in an order that depends on their place in a buffer."""
        return bool(self.in_place) and self.reduces_plainly and self._may_move_sums

    @property
    def splits_reductions(self) -> bool:
        return self.reduces_alone and self._may_move_sums

    @property
    def _may_move_sums(self) -> bool:
        return sums_may_move(self.ranks, exact=self.exact_sums)


def sums_may_move(ranks: int, *, exact: bool) -> bool:
    """Whether what `ranks` add up may stand elsewhere in a buffer than FSDP2 puts it.

    exact: the last bit counts. The order of a sum depends on the place; two numbers have one order.
    """
    return ranks == 2 or (ranks > 2 and not exact)


def settings_of(
    groups: Sequence[FsdpGroup], ranks_per_node: int | None = None, *, exact_sums: bool = True
) -> tuple[GroupSettings, ...]:
    """Settings of the groups of one graph, in their order.

    ranks_per_node: None takes torchrun's `LOCAL_WORLD_SIZE`, without which all ranks are taken to
    be on one node.
    """
    local = local_world_size() if ranks_per_node is None else ranks_per_node
    places: dict[State, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group.state, []).append(place)
    lanes: list[dist.ProcessGroup | None] = []

    def lane(process_group: dist.ProcessGroup | None) -> str:
        if process_group not in lanes:
            lanes.append(process_group)
        return f"lane {lanes.index(process_group)}"

    def lane_if_any(process_group: dist.ProcessGroup | None) -> str:
        return "" if process_group is None else lane(process_group)

    return tuple(
        GroupSettings(
            reshard=None if group.reshard_is_automatic else group.reshard_after_forward,
            is_root=is_root(group.state),
            ranks=group.world_size,
            ranks_per_node=most_on_node(shard_rows(group), local),
            gather_lane=lane(group.gather_process_group),
            reduce_lane=lane(group.reduce_process_group),
            shard_bytes=sum(map(_stored_bytes, group.params)),
            trainable=_trainable(group),
            reduce_item_bytes=max(p.reduce_item_bytes for p in group.params),
            kept_after_backward=not group.reshard_after_backward,
            regroups=group.gathers_plainly,
            in_place=group.sends_in_place,
            clones=group.clones,
            casts=any(p.sharded.dtype != p.wire_dtype for p in group.params),
            reduces_plainly=group.reduces_plainly and not any(map(_is_packed, group.params)),
            exact_sums=exact_sums,
            reduces_alone=group.reduces_alone,
            has_hooks=any(hooks_of(param.sharded) for param in group.params),
            may_reduce_apart=may_reduce_apart(group),
            has_all_reduce_hook=group.has_all_reduce_hook,
            post_forward_ranks=0
            if (smaller := group.post_forward_process_group) is None
            else smaller.size(),
            post_forward_lane=lane_if_any(smaller),
            node_ranks=len(ranks_on_node(group, local)),
            offloads_to_cpu=offloads_to_cpu(group.raw),
            forward_prefetch=_listed(group, Direction.FORWARD, places),
            backward_prefetch=_listed(group, Direction.BACKWARD, places),
            replicas=group.replicas,
            replicas_per_node=most_on_node(replica_rows(group), local),
            all_reduce_lane=lane_if_any(group.replicate_process_group),
            node_stride=node_stride(shard_rows(group), local),
            replica_node_stride=node_stride(replica_rows(group), local),
        )
        for group in groups
    )


def _listed(
    group: FsdpGroup, direction: Direction, places: Mapping[State, Sequence[int]]
) -> tuple[int, ...]:
    """Those of one `fully_shard` call in the order of their use, as FSDP2 does."""
    step = 1 if direction is Direction.FORWARD else -1
    named = group.prefetches(direction)
    return tuple(place for state in named for place in places.get(state, [])[::step])


def _is_packed(param: FsdpParam) -> bool:
    """Its gradient is copied before it is reduced, wherever it goes."""
    return param.shard_dim != 0 or param.reduce_dtype != param.dtype


def _trainable(group: FsdpGroup) -> TrainableShards:
    found = [p for p in group.params if p.sharded.requires_grad]
    numel = sum(math.prod(p.padded_shard_size) for p in found)
    return TrainableShards(sum(map(_stored_bytes, found)), numel)


def _stored_bytes(param: FsdpParam) -> int:
    if param.extension is None:
        return math.prod(param.padded_shard_size) * param.sharded.dtype.itemsize
    return sum(t.numel() * t.itemsize for t in plain_tensors(param.raw._sharded_local_tensor))
