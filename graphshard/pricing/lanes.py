"""Which collectives a group has, over which lanes they go, and which lanes share a link.

In: what FSDP2's settings say of each group, and a machine. Out: names and launch times of lanes, in
the order of their first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphshard.cost.comm import CollectiveKind
from graphshard.cost.comm import RankGroup as Ranks
from graphshard.cost.machine import Machine, collective_us, launch_us
from graphshard.cost.memory import ITEM_BYTES
from graphshard.fsdp2.settings import GroupSettings
from graphshard.schedule.plan import GroupInfo, ParamInfo


def lanes_of(
    groups: Sequence[GroupInfo], settings: Sequence[GroupSettings], machine: Machine
) -> dict[str, float]:
    """The lanes with their launch times; no collective of a group is shorter than its launch."""
    found: dict[str, float] = {}
    alike = dict.fromkeys(one for i in groups for one in _collectives(i, settings[i.id]))
    for kind, ranks, size_bytes in alike:
        if ranks.name not in found:
            launch = launch_us(machine, CollectiveKind.ALL_GATHER, ranks, 2**20)
            found[ranks.name] = float(launch)
        whole = float(collective_us(machine, kind, ranks, size_bytes))
        found[ranks.name] = min(found[ranks.name], whole)
    return found


def _collectives(
    info: GroupInfo, own: GroupSettings
) -> Iterator[tuple[CollectiveKind, Ranks, int]]:
    """Those of a whole group, each with its ranks and bytes; a frozen one counts as if trained."""
    gather, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    yield gather, shard_ranks(own, own.gather_lane), info.gathered_bytes
    trained = [param for param in info.params if param.trainable]
    ranks = shard_ranks(own, own.reduce_lane)
    yield reduce, ranks, grad_input_bytes(trained or info.params, own)
    for smaller in (post_forward_ranks(own), node_ranks(own)):
        if smaller is not None:
            yield gather, smaller, info.gathered_bytes
    replicas = replica_ranks(own)
    if replicas is not None:
        reduced_bytes = grad_input_bytes(trained or info.params, own) // own.ranks
        yield CollectiveKind.ALL_REDUCE, replicas, reduced_bytes


def links_of(settings: Sequence[GroupSettings]) -> dict[str, str]:
    """Lanes that use one link of a rank share it, whatever mesh or group they are of: those that go
    between nodes its part of the adapters, those that stay on a node its links there.

    Libraries' communicators do not know of each other. Assumed: the one does not slow the other
    down, although rings between nodes pass the links inside too.
    """
    between: dict[str, None] = {}
    inside: dict[str, None] = {}
    for own in settings:
        lanes = shard_ranks(own, own.gather_lane), shard_ranks(own, own.reduce_lane)
        others = post_forward_ranks(own), node_ranks(own), replica_ranks(own)
        for ranks in (*lanes, *others):
            if ranks is not None and ranks.ranks > 1:  # one rank sends nothing
                (between if ranks.nodes > 1 else inside)[ranks.name] = None
    return {lane: min(found) for found in (between, inside) if len(found) > 1 for lane in found}


def shard_ranks(own: GroupSettings, lane: str) -> Ranks:
    """Those that the group is sharded over, on its lane of gathers or of reductions."""
    return Ranks(own.ranks, own.ranks_per_node, lane, own.node_stride)


def post_forward_ranks(own: GroupSettings) -> Ranks | None:
    """They are neighbours: as many of them on one node as of the whole mesh, at most."""
    if not own.post_forward_ranks:
        return None
    on_a_node = min(own.post_forward_ranks, own.ranks_per_node)
    return Ranks(own.post_forward_ranks, on_a_node, own.post_forward_lane, own.node_stride)


def node_ranks(own: GroupSettings) -> Ranks | None:
    """Those of one node, where the plan may have them hold the group after forward."""
    if not own.node_ranks or own.reshard is not None:
        return None
    return Ranks(own.node_ranks, own.node_ranks, f"{own.gather_lane}, node")


def replica_ranks(own: GroupSettings) -> Ranks | None:
    """Those that all-reduce what was reduced: where a node is one replica, one on each node."""
    if not own.all_reduce_lane:
        return None
    return Ranks(own.replicas, own.replicas_per_node, own.all_reduce_lane, own.replica_node_stride)


def grad_input_bytes(params: Sequence[ParamInfo], own: GroupSettings) -> int:
    """Gradients of `params` on the wire."""
    plain = (p.gathered_bytes // ITEM_BYTES[p.dtype] for p in params if p.extension is None)
    others = (p.extension.grad_numel for p in params if p.extension is not None)
    return own.reduce_item_bytes * (sum(plain) + sum(others))
