"""Meshes that do not fit nodes: every rank plans with the same figures, those of the slowest row.

Drawn: ranks, nodes of any size, replicas that straddle nodes, meshes whose ranks are in any order.
"""

import os

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphshard import fsdp2
from graphshard.fsdp2.settings import settings_of

CASES = int(os.environ.get("GRAPHSHARD_EXAMPLES", "15"))


def num_ranks(layout):
    return sum(map(len, layout))


def seen_by(rank, layout, ranks_per_node):
    """Settings of the one group on this rank."""
    world = num_ranks(layout)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        ranks = layout if len(layout) > 1 else layout[0]
        names = ("replicate", "shard")[-1 if len(layout) == 1 else 0 :]
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        fsdp2.lazy_init(fsdp2.state_of(model))
        groups = fsdp2.fsdp_groups(fsdp2.state_of(model))
        (own,) = settings_of(groups, ranks_per_node)
    finally:
        dist.destroy_process_group()
    return own


@st.composite
def layouts(draw):
    """Rows of ranks, one for each replica."""
    shards, replicas = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    order = list(range(shards * replicas))
    if draw(st.sampled_from([False, False, True])):
        order = draw(st.permutations(order))
    return [order[at : at + shards] for at in range(0, len(order), shards)]


def nodes(ranks, ranks_per_node):
    return [
        [one for one in ranks if one // ranks_per_node == node]
        for node in sorted({one // ranks_per_node for one in ranks})
    ]


@settings(deadline=None, max_examples=CASES, derandomize=True)
@given(layout=layouts(), ranks_per_node=st.integers(1, 8))
@example(layout=[[0, 1, 2, 3, 4, 5]], ranks_per_node=4)
@example(layout=[[0, 1, 2], [3, 4, 5]], ranks_per_node=4)  # the second replica is on two nodes
@example(layout=[[0, 1, 2, 3], [4, 5, 6, 7]], ranks_per_node=6)  # evenly, and the first on one
def test_all_ranks_see_the_same_nodes(layout, ranks_per_node):
    found = [seen_by(rank, layout, ranks_per_node) for rank in range(num_ranks(layout))]
    figures = {(own.ranks_per_node, own.replicas_per_node, own.node_ranks) for own in found}
    assert len(figures) == 1
    ((per_node, replicas_per_node, node_ranks),) = figures
    rows = [nodes(row, ranks_per_node) for row in layout]
    assert 1 <= per_node <= min(len(layout[0]), ranks_per_node)
    assert (per_node < len(layout[0])) is any(len(row) > 1 for row in rows)
    columns = [nodes(column, ranks_per_node) for column in zip(*layout, strict=True)]
    assert (replicas_per_node < len(layout)) is any(len(column) > 1 for column in columns)
    sizes = {len(node) for row in rows for node in row}
    fits = len(sizes) == 1 and sizes != {1} and all(len(row) > 1 for row in rows)
    assert node_ranks == (sizes.pop() if fits else 0)
