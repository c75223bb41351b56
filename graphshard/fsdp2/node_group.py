"""The ranks of one node among those that a group is sharded over, and their process group.

As of an int `reshard_after_forward`, which the user did not set: between forward and backward they
may hold the group among them, so that backward gathers over the links of the node only.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch.distributed as dist

from graphshard.fsdp2.group import FsdpGroup


def local_world_size() -> int:
    """torchrun's; 0 without it: nothing is known of nodes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def most_on_node(process_group: dist.ProcessGroup | None, ranks_per_node: int) -> int:
    """Of these ranks as many as there are on one node at most; 1 without a process group.

    Ranks of a mesh may lie apart: those that share a place in other dims (tensor or expert
    parallel, or shards of HSDP's replicas) are one per node where these fill a node. Assumed: as in
    `ranks_on_node`.
    """
    if process_group is None:
        return 1
    nodes = _by_node(process_group, ranks_per_node) if ranks_per_node else {}
    return max(map(len, nodes.values()), default=process_group.size())


def node_stride(process_group: dist.ProcessGroup | None, ranks_per_node: int) -> int:
    """From one node of these ranks to their next one, in nodes, at most; 1 on one node. Assumed: as
    in `ranks_on_node`."""
    nodes = sorted(_by_node(process_group, ranks_per_node)) if ranks_per_node else []
    return max((after - before for before, after in pairwise(nodes)), default=1)


def _by_node(process_group: dist.ProcessGroup | None, ranks_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in () if process_group is None else dist.get_process_group_ranks(process_group):
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes


def ranks_on_node(group: FsdpGroup, ranks_per_node: int) -> tuple[int, ...]:
    """Global ranks of this rank's node. Empty where no node can hold the group by itself: another
    mesh or all-gather is set, extensions say what travels, all ranks are on one node or each is
    alone on its own, or not every node has as many.

    Assumed: ranks are numbered node by node, as torchrun does it.
    """
    if not ranks_per_node or not group.gathers_plainly or group.has_extensions:
        return ()
    nodes = _by_node(group.gather_process_group, ranks_per_node)
    sizes = {len(ranks) for ranks in nodes.values()}
    if len(nodes) <= 1 or len(sizes) > 1 or sizes == {1}:
        return ()
    return tuple(nodes[dist.get_rank() // ranks_per_node])


def node_process_group(
    group: FsdpGroup, made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    """Of the ranks of this node; None where `ranks_on_node` has none.

    made: those that exist already, by rank; a new one is added. All ranks of the group call this.
    """
    ranks = ranks_on_node(group, local_world_size())
    if ranks and ranks not in made:
        made[ranks] = dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="graphshard_node"
        )
    return made.get(ranks)
