"""The ranks of one node among those that a group is sharded over, and their process group.

As of an int `reshard_after_forward`, which the user did not set: between forward and backward they
may hold the group among them, so that backward gathers over the links of the node only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from graphshard.fsdp2.group import FsdpGroup


def local_world_size() -> int:
    """torchrun's; 0 without it: nothing is known of nodes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def shard_rows(group: FsdpGroup) -> list[list[int]]:
    """Global ranks over which the group is sharded: of each replica. Empty if none is."""
    if group.gather_process_group is None:
        return []
    return _rows(group, group.raw.mesh_info.shard_mesh_dim)


def replica_rows(group: FsdpGroup) -> list[list[int]]:
    """Global ranks that all-reduce with each other: of each shard. Empty without replicas."""
    if group.replicate_process_group is None:
        return []
    return _rows(group, group.raw.mesh_info.replicate_mesh_dim)


def _rows(group: FsdpGroup, dim: int) -> list[list[int]]:
    with _disable_current_modes():  # a graph may be being traced
        mesh = group.raw.mesh_info.mesh.mesh
        rows: list[list[int]] = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
    return rows


def most_on_node(rows: Sequence[Sequence[int]], ranks_per_node: int) -> int:
    """Of the ranks of a row as many as there are on one node at most, in the row where that is
    least: the one on most nodes is the slowest, and others wait for it. 1 without rows.

    Ranks of a mesh may lie apart: those that share a place in other dims (tensor or expert
    parallel, or shards of HSDP's replicas) are one per node where these fill a node. Assumed: as in
    `ranks_on_node`.
    """
    if not ranks_per_node:
        return max(map(len, rows), default=1)
    return min((max(_sizes_by_node(row, ranks_per_node)) for row in rows), default=1)


def node_stride(rows: Sequence[Sequence[int]], ranks_per_node: int) -> int:
    """From one node of the ranks of a row to their next one, in nodes, at most; 1 on one node.
    Assumed: as in `ranks_on_node`."""
    if not ranks_per_node:
        return 1
    nodes = [sorted({rank // ranks_per_node for rank in row}) for row in rows]
    return max((after - before for own in nodes for before, after in pairwise(own)), default=1)


def _sizes_by_node(ranks: Sequence[int], ranks_per_node: int) -> list[int]:
    return list(Counter(rank // ranks_per_node for rank in ranks).values())


def ranks_on_node(group: FsdpGroup, ranks_per_node: int) -> tuple[int, ...]:
    """Global ranks of this rank's node. Empty where no node can hold the group by itself: another
    mesh or all-gather is set, extensions say what travels, all ranks are on one node or each is
    alone on its own, or not every node has as many, in this replica or in another one.

    Assumed: ranks are numbered node by node, as torchrun does it.
    """
    if not ranks_per_node or not group.gathers_plainly or group.has_extensions:
        return ()
    rows = shard_rows(group)
    sizes = [_sizes_by_node(row, ranks_per_node) for row in rows]
    if any(len(own) <= 1 for own in sizes) or len({size for own in sizes for size in own}) != 1:
        return ()
    if sizes[0][0] == 1:
        return ()
    rank, own = dist.get_rank(), next(row for row in rows if dist.get_rank() in row)
    return tuple(one for one in own if one // ranks_per_node == rank // ranks_per_node)


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
