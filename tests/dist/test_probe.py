"""A few collectives and products before the first plan: by all ranks or by none, never twice."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from launches import OPTIONS, first_launch
from models import of_depth
from parity import assert_equal, build, count_collectives, train
from patching import patched
from pool import Ctx, Pool
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.compiler import graph_compiler, planning_inputs
from graphshard.runtime import probe

pytestmark = pytest.mark.dist

CASE = of_depth("llama", 1)


def compiled(ctx: Ctx, **options: Any) -> nn.Module:
    model = build(CASE, ctx)
    model.compile(backend="graphshard", fullgraph=True, options={**OPTIONS, **options})
    return model


@contextmanager
def probes() -> Iterator[list[probe.Probed]]:
    """What each probe inside has found; none takes of the user's random numbers."""
    made: list[probe.Probed] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = torch.get_rng_state()
            made.append(original(*args))
            with _disable_current_modes():  # a graph is being traced
                assert torch.equal(torch.get_rng_state(), before)
            return made[-1]

        return call

    with patched(planning_inputs, "probe", noted):
        yield made


def num_runs(made: list[probe.Probed]) -> int:
    return sum(len(found.collectives) + len(found.products) for found in made)


def costs(model: nn.Module) -> tuple[float, float]:
    """What the plan was told: the longest gather, and all regions of forward."""
    (problem,) = (c.problem for record in root_states_under(model) for c in record.plans.values())
    gathers = [part.gather.us for group in problem.groups for part in group.parts]
    return max(gathers), sum(region.us for region in problem.forward)


def slower(pause_s: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pause_s)
            return original(*args, **kwargs)

        return call

    return make


@first_launch
def slow(
    ctx: Ctx, gather_s: float, product_s: float
) -> tuple[tuple[float, float], list[tuple[str, float]], str]:
    """With collectives and products that take so much longer."""

    def products(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: slower(product_s)(original(*args))

    expected = train(build(CASE, ctx), CASE, ctx, 2)
    slower_gathers = patched(probe, "finish", slower(gather_s))
    with probes() as made, slower_gathers, patched(probe, "product", products):
        model = compiled(ctx)
        assert_equal(expected, train(model, CASE, ctx, 2))
    (found,) = made
    (plan,) = graphshard.plans(model)
    said = [(str(one.kind), one.us) for one in found.collectives]
    said += [(str(one.dtype), one.us) for one in found.products]
    return costs(model), said, plan.to_json()


def test_the_first_plan_knows_network_and_device(pool: Pool) -> None:
    quick, _ = pool.run(2, slow, 0.0, 0.0)
    gathers, other = pool.run(2, slow, 0.02, 0.0)
    products, _ = pool.run(2, slow, 0.0, 0.8)
    assert gathers == other
    kinds = ["all_gather", "reduce_scatter", "torch.float32"]
    assert [[kind for kind, _ in said] for _, said, _ in (gathers, products)] == [kinds, kinds]
    assert all(us > 20_000 for _, us in gathers[1][:2])
    assert products[1][2][1] > 800_000
    (quick_gather_us, quick_forward_us), (gather_us, _) = quick[0], gathers[0]
    assert quick_gather_us < 10_000 < gather_us
    assert products[0][1] > 3 * quick_forward_us


@first_launch
def one_stays_away(ctx: Ctx, how: str) -> int:
    """Rank 1 does not tune, or does not plan; all the same nobody waits for long."""
    options: dict[str, Any] = {}
    if ctx.rank == 1:
        options = {"replan_after": 0} if how == "not tuned" else {"verify": "off"}
    if how == "nobody asked":
        options = {"verify": "off"}
    began = time.monotonic()
    with probes() as made:
        model = compiled(ctx, **options)
        if how == "not tuned":
            with pytest.raises(graphshard.DivergedRanks, match="GS708"):
                train(model, CASE, ctx, 1)
        else:
            train(model, CASE, ctx, 1)
    assert time.monotonic() - began < 30
    return num_runs(made)


@pytest.mark.parametrize("how", ["not tuned", "nobody asked"])
def test_a_rank_that_stays_away(pool: Pool, how: str) -> None:
    assert pool.run(2, one_stays_away, how, timeout_s=60) == [0, 0]


@first_launch
def one_cannot(ctx: Ctx) -> tuple[int, bool]:
    """Rank 1 fails to plan; FSDP2 runs both."""

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise RuntimeError("no plan on rank 1")

        return call if ctx.rank == 1 else original

    expected = train(build(CASE, ctx), CASE, ctx, 2)
    with probes() as made, patched(graph_compiler, "planning_inputs", fails):
        model = build(CASE, ctx)
        model.compile(backend="graphshard", options={"replan_after": None})
        assert_equal(expected, train(model, CASE, ctx, 2))
    return num_runs(made), bool(graphshard.plans(model))


def test_a_rank_that_cannot_plan(pool: Pool) -> None:
    assert pool.run(2, one_cannot, timeout_s=60) == [(0, False)] * 2


@first_launch
def later(ctx: Ctx, alone: int) -> tuple[list[int], int]:
    """Other graphs of the model, compiled by one rank alone, and another model."""
    oracle, model = build(CASE, ctx), compiled(ctx)
    with probes() as made:
        for number in range(3):
            batch = CASE.batch(number, ctx.rank, ctx.device)
            if number and ctx.rank == number - 1:
                batch = tuple(tensor[:1] for tensor in batch)
            losses = [CASE.loss(net, batch) for net in (oracle, model)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        model.zero_grad()
        with count_collectives() as counts:
            CASE.loss(model, CASE.batch(0, ctx.rank, ctx.device)).backward()
        other = compiled(ctx)  # Dynamo has its graph
        batch = CASE.batch(0, ctx.rank, ctx.device)
        if ctx.rank == alone:
            batch = tuple(tensor[:2] for tensor in batch)  # but for this length
        CASE.loss(other, batch).backward()
    return [len(found.collectives) for found in made], counts.all_gather


@pytest.mark.parametrize("alone", [0, 1])
def test_it_runs_once_for_each_model(pool: Pool, alone: int) -> None:
    (first, gathers), (second, others) = pool.run(2, later, alone, timeout_s=100)
    assert first[0] == second[0] == 2
    assert sum(first[1:]) == sum(second[1:]) == 0
    assert gathers == others
