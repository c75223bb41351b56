"""The main claim: one forward and one backward graph, bitwise equal to eager FSDP2."""

from contextlib import nullcontext

import pytest
import torch
from models import CASES, Case, Llama, shard_blocks
from parity import (
    STRICT,
    assert_equal,
    assert_one_plan,
    count_collectives,
    parity_case,
    train,
    twin,
)
from patching import compiled_in_place, in_place
from poison import poisoned
from pool import Ctx, Pool
from torch import nn

import graphshard

pytestmark = pytest.mark.dist


def follows_eager(ctx: Ctx, name: str, plans_in_place: bool) -> dict[str, tuple[int, int]]:
    """One model, compiled once: plain steps, micro-steps, collectives, with poison.

    plans_in_place: its plan is made for collectives from and to where tensors are.
    """
    case = CASES[name]
    oracle, model = twin(case, ctx)

    def equal(steps: int, first_step: int, micro_steps: int = 1) -> None:
        told = {"first_step": first_step, "micro_steps": micro_steps}
        assert_equal(
            train(oracle, case, ctx, steps, **told), train(model, case, ctx, steps, **told)
        )

    with compiled_in_place() if plans_in_place else nullcontext():
        model.compile(backend="graphshard", **STRICT)
        equal(10, 0)
    equal(3, 10, micro_steps=4)
    assert_one_plan(model)
    seen = collectives(ctx, case, oracle, model, 13)
    for sends_in_place, used in ((False, "all_gather"), (True, "gather_in_place")):
        with in_place(model, sends_in_place), poisoned() as calls:
            equal(5, 5 * sends_in_place)
        assert calls[used] > 0 or ctx.world_size == 1
        assert calls["free"] > 0
    return seen


def collectives(
    ctx: Ctx, case: Case, oracle: nn.Module, model: nn.Module, step: int
) -> dict[str, tuple[int, int]]:
    """All-gathers and reduce-scatters of one step, as planned, and as FSDP2 orders them itself;
    the number of groups."""
    seen = {}
    for label, net in (("eager", oracle), ("compiled", model)):
        with count_collectives() as counted:
            train(net, case, ctx, 1, first_step=step)
        seen[label] = (counted.all_gather, counted.reduce_scatter)
    (plan,) = graphshard.plans(model)
    assert plan.fsdp2 is not None
    for label, schedules in (("planned", plan.schedules), ("own order", plan.fsdp2.schedules)):
        gathers = sum(schedule.num_all_gathers for schedule in schedules)
        seen[label] = (gathers, sum(schedule.num_reduce_scatters for schedule in schedules))
    return {**seen, "groups": (len(plan.groups), len(plan.groups))}


@pytest.mark.parametrize(
    ("name", "ranks", "plans_in_place"),
    [*((name, 2, False) for name in CASES), ("llama", 4, True), ("moe", 4, True)],
)
def test_models_equal_eager_fsdp2(pool: Pool, name: str, ranks: int, plans_in_place: bool) -> None:
    """A missing wait or a use after the release would show."""
    for seen in pool.run(ranks, follows_eager, name, plans_in_place, timeout_s=280):
        if seen["eager"] != (0, 0):  # one rank has no collectives
            assert seen["eager"] == seen["own order"]
            assert seen["compiled"] == seen["planned"]
        if name == "llama":
            groups, _ = seen["groups"]
            assert seen["own order"] == (2 * groups - 1, groups)


@pytest.mark.parametrize("how", ["wrapped", "step function"])
def test_three_ways_to_compile(pool: Pool, how: str) -> None:
    pool.run(2, parity_case, "gpt_tied", how, 3, {})


def with_setting(ctx: Ctx, reshard: bool) -> dict[str, tuple[int, int]]:
    case = CASES["llama"]
    oracle, model = twin(case, ctx, reshard_after_forward=reshard)
    model.compile(backend="graphshard", options={"fallback": "error", "schedule": "fsdp2"})
    assert_equal(train(oracle, case, ctx, 3), train(model, case, ctx, 3))
    return collectives(ctx, case, oracle, model, 3)


@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_are_those_of_fsdp2(pool: Pool, reshard: bool) -> None:
    for seen in pool.run(2, with_setting, reshard):
        groups, _ = seen["groups"]
        gathers = 2 * groups if reshard else groups
        assert seen["planned"] == (gathers, groups)
        if seen["eager"] != (0, 0):  # one rank has no collectives
            assert seen["compiled"] == seen["eager"] == (gathers, groups)


def per_block(ctx: Ctx) -> tuple[int, int, int]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return shard_blocks(("blocks",), Llama(depth=16).to(ctx.device), ctx.mesh)

    oracle, model = make(), make()
    case = CASES["llama"]
    expected = train(oracle, case, ctx, 2)
    for block in model.blocks:
        block.compile(backend="graphshard", options={"fallback": "error", "promote": False})
    assert_equal(expected, train(model, case, ctx, 2))
    report = graphshard.explain(model)
    return report.captured, report.present, report.graphs


def test_sixteen_identical_blocks_share_one_graph(pool: Pool) -> None:
    for captured, present, graphs in pool.run(2, per_block, timeout_s=240):
        assert (captured, present) == (16, 17)
        assert graphs == 2
