"""Planning offline with several meshes: each group over its own ranks, wherever these are."""

from functools import partial

import pytest
import torch
from mesh_models import WIDTH, blocks, two_meshes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.fsdp2.versions import TORCH
from graphshard.offline.api import machine_of
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Study
from graphshard.offline.world import Made
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Plan

RANKS = 64
planned = partial(graphshard.plan, world_size=RANKS, hardware="h100-ethernet100")
INPUTS = (torch.randn(4, WIDTH),)


def sharded_over(dim: str) -> nn.Module:
    """Eight ranks of one node ("inner"), or one of each node ("outer")."""
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("outer", "inner"))[dim]
    model = blocks()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def test_ranks_of_a_mesh_may_be_one_per_node() -> None:
    inner, outer = (planned(partial(sharded_over, dim), INPUTS) for dim in ("inner", "outer"))
    assert step_us(outer) > 2 * step_us(inner)
    assert (inner.priced_on.ranks_per_node, outer.priced_on.ranks_per_node) == (8, 1)


def step_us(plan: Plan) -> float:
    return plan.estimate.ours.step_time_us


@pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13")
@pytest.mark.parametrize("whole", [False, True], ids=["a few blocks", "all"])
def test_each_group_of_a_block_has_its_mesh(whole: bool) -> None:
    point = Point(RANKS, 8, machine_of("h100"), PlanningPolicy(None))
    study = Study("plan", lambda sizes: Made(two_meshes(), INPUTS, {}), (point,), whole=whole)
    ((plan,),) = ([answer.plan] for answer in study.answers())
    assert study.effort.num_repeated == (0 if whole else 4)
    assert len(plan.groups) == 2 * (CAPTURED + 2)
    for number, group in enumerate(plan.groups):
        block, is_second = divmod(number, 2)
        mesh, ranks = ("outer", 8) if is_second else ("dp", RANKS)
        assert (group.fqn, group.world_size) == (f"{block} [{mesh}]", ranks)
        own = ["2.weight"] if is_second else ["0.weight", "0.bias", "2.bias"]
        assert [p.fqn for p in group.params] == [f"{block}.{name}" for name in own]
