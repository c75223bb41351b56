"""Oversubscribed switches between nodes: what leaves a pod of nodes is slower (`cost/comm.py`)."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.cost.comm import (
    CollectiveKind,
    RankGroup,
    SwitchLevel,
    bus_bytes_per_us,
    slowdown,
)
from graphshard.cost.machine import collective_us
from graphshard.cost.machine_text import from_text, to_text
from graphshard.cost.presets import facts_of, preset
from graphshard.errors import CostError
from graphshard.fsdp2.node_group import node_stride

few = st.integers(1, 24)


def leaving(pod: int, stride: int, members: int) -> int:
    """Of the nodes of one pod, as many as send to another pod, at most: each ring's nodes are
    `stride` apart, `stride` rings side by side use all nodes."""
    count, out = stride * members, {}
    for node in range(count):
        after = (node + stride) % count
        out[node // pod] = out.get(node // pod, 0) + (node // pod != after // pod)
    return max(out.values())


@given(few, few, st.integers(2, 24), st.floats(1.0, 8.0))
def test_rings_share_what_leaves_a_pod(pod, stride, members, oversubscribed):
    level = SwitchLevel(pod, oversubscribed)
    found = slowdown(level, RankGroup(8 * members, 8, node_stride=stride))
    counted = max(1.0, oversubscribed * leaving(pod, stride, members) / pod)
    assert found >= counted - 1e-9
    full = stride * members % pod == 0 and (stride % pod == 0 or pod % stride == 0)
    if full or stride * members <= pod:
        assert found == pytest.approx(counted)


def test_a_level_that_is_not_oversubscribed_slows_nothing():
    group = RankGroup(4, 1, node_stride=16)
    assert slowdown(SwitchLevel(4, 1.0), group) == 1
    plain, level = (preset(f"h100-ib400{more}") for more in ("", ":pod=4:oversubscribed=1"))
    kind = CollectiveKind.ALL_REDUCE
    assert collective_us(plain, kind, group, 1e9) == collective_us(level, kind, group, 1e9)


def test_the_narrowest_level_counts():
    network = preset("h100-ib400:pod=4:oversubscribed=2:pod=16:oversubscribed=8").network
    rates = [bus_bytes_per_us(network, RankGroup(4, 1, "", n)) / 46e3 for n in (1, 2, 4, 8, 16)]
    # Neighbours stay in a pod; then half of each pod sends out of it, then all of it; from 8 nodes
    # on the larger pods' are the limit, of which half sends out, then all.
    assert rates == [1, 1, 1 / 2, 1 / 4, 1 / 8]


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("h100-ib400:oversubscribed=2", [(1, 2.0)]),
        ("h100-200Gbit:pod=32:oversubscribed=1.5", [(32, 1.5)]),
        (
            "H100-IB400:POD=32:OVERSUBSCRIBED=2:POD=384:OVERSUBSCRIBED=7",
            [(32, 2.0), (384, 7.0)],
        ),
        ("h100-meta24k", [(384, 7.0)]),
        ("h100-meta24k:pod=8:oversubscribed=1", [(8, 1.0)]),
        ("h100-ib400", []),
    ],
)
def test_levels_stand_in_a_machines_name(name, levels):
    machine = preset(name)
    assert [(one.nodes, one.oversubscribed) for one in machine.network.levels] == levels
    assert preset(machine.name) == machine
    assert from_text(to_text(machine)) == machine
    told = {fact.path: fact.value for fact in facts_of(name) if fact.path[0] == "level"}
    assert [*told.values()] == [number for level in levels for number in level]


@pytest.mark.parametrize(
    "levels",
    [
        "",
        "pod=32",
        "2",
        "pod=0:oversubscribed=2",
        "oversubscribed=0.5",
        "oversubscribed=1e9",
        "oversubscribed=2:",
        "pod=32:oversubscribed=2:pod=32:oversubscribed=3",
        "oversubscribed=2:slow",
    ],
)
def test_what_is_no_level(levels):
    with pytest.raises(CostError, match=r"GS501: .*:pod=32:oversubscribed=2"):
        preset(f"h100-ib400:{levels}")


# -- whose rings they are --------------------------------------------------------------------------


def test_the_nodes_of_a_mesh_lie_as_far_apart_as_its_ranks():
    ranks = torch.arange(64).view(4, 8, 2)  # replicas, shards, tensor parallel
    rows = [ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist() for dim in range(3)]
    assert [node_stride(own, 8) for own in rows] == [2, 1, 1]
    # The row whose nodes are farthest apart counts, on all ranks.
    assert node_stride([[0, 8], [16, 48]], 8) == 4


WIDTH = 4096


def sharded(*shape: int) -> nn.Module:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def step_us(network: str, *shape: int) -> float:
    plan = graphshard.plan(
        partial(sharded, *shape),
        (torch.randn(64, WIDTH),),
        world_size=128,
        hardware=f"h100-{network}",
    )
    assert plan.priced_on.machine == f"h100-{network}"
    return plan.estimate.fsdp2.step_time_us


def test_replicas_that_are_as_large_as_a_pod_are_slowed_down():
    """16 nodes: all shards one ring, which leaves each pod once, or replicas of 4 nodes."""
    slow = "ethernet50:pod=4:oversubscribed=4"
    assert step_us(slow, 128) == step_us("ethernet50", 128)
    replicated_us = step_us("ethernet50", 4, 32)
    assert step_us(slow, 4, 32) > 1.2 * replicated_us
    assert step_us("ethernet50:pod=16:oversubscribed=4", 4, 32) == replicated_us
