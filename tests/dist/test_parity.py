"""The main claim: one forward and one backward graph, bitwise equal to eager FSDP2."""

from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Llama, shard_blocks
from parity import assert_equal, build, count_collectives, train, twin
from pool import Ctx, Pool, capped
from torch import nn

import graphshard

pytestmark = pytest.mark.dist

STRICT: dict[str, Any] = {"fullgraph": True, "options": {"fallback": "error"}}


def compiled_loss(how: str, model: nn.Module, case: Any) -> Any:
    """`loss(batch)` of `model`, compiled in one of the three ways that users have."""
    if how == "in place":
        model.compile(backend="graphshard", **STRICT)
        return partial(case.loss, model)
    if how == "wrapped":
        return partial(case.loss, torch.compile(model, backend="graphshard", **STRICT))
    return torch.compile(partial(case.loss, model), backend="graphshard", **STRICT)


def parity_case(ctx: Ctx, name: str, how: str, steps: int, kwargs: dict[str, Any]) -> str:
    case = CASES[name]
    micro_steps = kwargs.pop("micro_steps", 1)
    oracle, model = twin(case, ctx, **kwargs)
    expected = train(oracle, case, ctx, steps, micro_steps=micro_steps)
    loss = compiled_loss(how, model, case)
    actual = train(model, case, ctx, steps, run=loss, micro_steps=micro_steps)
    assert_equal(expected, actual)
    plans, report = graphshard.plans(model), graphshard.explain(model)
    assert [p.summary()["graphs"] for p in plans] == [2], str(report)
    assert report.captured == report.present == plans[0].summary()["groups"]
    assert not report.reasons
    return str(report)


@pytest.mark.parametrize("name", list(CASES))
def test_five_models_equal_eager_fsdp2(pool: Pool, name: str) -> None:
    pool.run(2, parity_case, name, "in place", 10, {}, timeout_s=240)


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_two_models_on_four_ranks(pool: Pool, name: str) -> None:
    pool.run(4, parity_case, name, "in place", 10, {}, timeout_s=280)


@pytest.mark.parametrize("how", ["wrapped", "step function"])
def test_three_ways_to_compile(pool: Pool, how: str) -> None:
    pool.run(2, parity_case, "gpt_tied", how, 3, {})


@pytest.mark.parametrize("reshard", [True, False])
def test_explicit_reshard_after_forward(pool: Pool, reshard: bool) -> None:
    pool.run(2, parity_case, "llama", "in place", 3, {"reshard_after_forward": reshard})


@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_gradient_accumulation(pool: Pool, name: str) -> None:
    pool.run(2, parity_case, name, "in place", 3, {"micro_steps": 4})


def counts(ctx: Ctx, reshard: bool | None) -> dict[str, Any]:
    case = CASES["llama"]
    kwargs = {} if reshard is None else {"reshard_after_forward": reshard}
    oracle, model = twin(case, ctx, **kwargs)
    model.compile(backend="graphshard", **STRICT)
    seen = {}
    for label, net in (("eager", oracle), ("compiled", model)):
        train(net, case, ctx, 1)
        with count_collectives() as counted:
            train(net, case, ctx, 1, first_step=1)
        seen[label] = (counted.all_gather, counted.reduce_scatter)
    plan = graphshard.plans(model)[0]
    summary = plan.summary()
    seen["planned"] = (summary["all_gathers"], summary["reduce_scatters"])
    seen["groups"] = summary["groups"]
    return seen


@pytest.mark.parametrize("reshard", [None, True, False])
def test_collectives_are_those_of_fsdp2(pool: Pool, reshard: bool | None) -> None:
    for seen in pool.run(2, counts, reshard):
        groups = seen["groups"]
        gathers = {None: 2 * groups - 1, True: 2 * groups, False: groups}[reshard]
        assert seen["planned"] == (gathers, groups)
        if seen["eager"] != (0, 0):  # one rank has no collectives
            assert seen["compiled"] == seen["eager"] == (gathers, groups)


def accumulation_counts(ctx: Ctx) -> tuple[int, int, int]:
    case = CASES["llama"]
    model = build(case, ctx)
    model.compile(backend="graphshard", **STRICT)
    train(model, case, ctx, 1, micro_steps=4)
    variants = len(graphshard.plans(model))
    with count_collectives() as counted:
        train(model, case, ctx, 1, micro_steps=4, first_step=1)
    assert len(graphshard.plans(model)) == variants
    return counted.reduce_scatter, graphshard.plans(model)[0].summary()["groups"], variants


def test_four_micro_steps_reduce_once(pool: Pool) -> None:
    for reduced, groups, variants in pool.run(2, accumulation_counts):
        assert reduced == (groups if capped(2) > 1 else 0)
        assert variants == 1


def per_block(ctx: Ctx) -> tuple[int, int, int]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return shard_blocks(("blocks",), Llama(depth=16).to(ctx.device), ctx.mesh)

    oracle, model = make(), make()
    case = CASES["llama"]
    expected = train(oracle, case, ctx, 2)
    for block in model.blocks:
        block.compile(backend="graphshard", **STRICT)
    assert_equal(expected, train(model, case, ctx, 2))
    report = graphshard.explain(model)
    return report.captured, report.present, report.graphs


def test_sixteen_identical_blocks_share_one_graph(pool: Pool) -> None:
    for captured, present, graphs in pool.run(2, per_block, timeout_s=240):
        assert (captured, present) == (16, 17)
        assert graphs == 2
