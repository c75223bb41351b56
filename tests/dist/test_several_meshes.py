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
from graphshard.doctor.describe import describe_groups, gradients_of
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


def described(ctx: Ctx) -> list[tuple[str, str, int, int, bool]]:
    """What `graphshard doctor` sees of each group."""
    model = built(ctx)
    model.compile(backend="graphshard", options={"fallback": "error"})
    SPARSE.loss(model, SPARSE.batch(0, ctx.rank, ctx.device)).backward()
    facts, gradients = describe_groups([model]), gradients_of([model])
    return [
        (group.name, gradient.group, len(gradient.norms), group.ranks, group.in_graph)
        for group, gradient in zip(facts, gradients, strict=True)
    ]


def test_the_doctor_tells_the_groups_of_a_module_apart(pool: Pool) -> None:
    rows = pool.run(4, described)[0]
    blocks = [
        (f"blocks.{n} [mesh {mesh}]", params, ranks)
        for n in range(3)
        for mesh, params, ranks in ((1, 2, 4), (2, 2, 2))
    ]
    wanted = [("(root)", 2, 4), *blocks]
    assert rows == [(name, name, params, ranks, True) for name, params, ranks in wanted]


def test_ranks_of_other_costs_run_one_plan(pool: Pool) -> None:
    plan, *others = pool.run(4, with_other_costs)
    assert all(one.to_json() == plan.to_json() for one in others)
    blocks = [f"blocks.{n} [mesh {mesh}]" for n in range(3) for mesh in (1, 2)]
    assert [group.fqn for group in plan.groups] == ["(root)", *blocks]
