"""Parameters of one `fully_shard` call on several meshes: ranks agree on the mesh that has all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import assert_equal, train
from patching import patched
from pool import Ctx, Pool
from rows_experts import SPARSE, expert_parallel
from torch import nn

import graphshard
from graphshard.compiler import planning_inputs
from graphshard.fsdp2.versions import TORCH

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13"),
]


def slower(rank: int) -> Any:
    """To this rank its network seems slower the higher its number."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def machine_for(*args: Any) -> Any:
            machine = original(*args)
            rate = machine.network.intra_bytes_per_us / 10 ** (3 * rank)
            return replace(machine, network=replace(machine.network, intra_bytes_per_us=rate))

        return machine_for

    return patched(planning_inputs, "machine_for", make)


def built(ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    return expert_parallel(SPARSE.build().to(ctx.device), ctx)


def with_other_costs(ctx: Ctx) -> graphshard.Plan:
    oracle, model = built(ctx), built(ctx)
    model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    expected = train(oracle, SPARSE, ctx, 4)
    with slower(ctx.rank):
        assert_equal(expected, train(model, SPARSE, ctx, 4))
    (plan,) = graphshard.plans(model)
    return plan


def test_ranks_of_other_costs_run_one_plan(pool: Pool) -> None:
    plan, *others = pool.run(4, with_other_costs)
    assert all(one.to_json() == plan.to_json() for one in others)
    blocks = [f"blocks.{n} [mesh {mesh}]" for n in range(3) for mesh in (1, 2)]
    assert [group.fqn for group in plan.groups] == ["(root)", *blocks]
