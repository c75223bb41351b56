"""A few collectives and products before the first plan: by all ranks or by none, never twice."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import CASES
from parity import assert_equal, build, count_collectives, train
from patching import patched
from pool import Ctx, Pool
from test_tuning import first_launch
from torch import nn

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.compiler import graph_compiler, planning_inputs
from graphshard.runtime import probe

pytestmark = pytest.mark.dist

CASE = CASES["llama"]
OPTIONS: dict[str, Any] = {"fallback": "error", "replan_after": None}


def compiled(ctx: Ctx, **options: Any) -> nn.Module:
    model = build(CASE, ctx)
    model.compile(backend="graphshard", fullgraph=True, options={**OPTIONS, **options})
    return model


@contextmanager
def probes() -> Iterator[list[probe.Probed]]:
    """What each probe inside has found."""
    made: list[probe.Probed] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made.append(original(*args))
            return made[-1]

        return call

    with patched(planning_inputs, "probe", noted):
        yield made


def num_runs(made: list[probe.Probed]) -> int:
    return sum(len(found.collectives) + len(found.products) for found in made)


def gather_us(model: nn.Module) -> list[float]:
    """What the plan was told that gathers take."""
    problems = [c.problem for record in root_states_under(model) for c in record.plans.values()]
    return [part.gather.us for problem in problems for g in problem.groups for part in g.parts]


@first_launch
def slow(ctx: Ctx, pause_s: float) -> tuple[list[float], list[tuple[str, int, float]], str]:
    """With collectives that take `pause_s` longer, on rank 1 alone as all of them do on both."""

    def slower(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pause_s)
            return original(*args, **kwargs)

        return call

    expected = train(build(CASE, ctx), CASE, ctx, 2)
    with probes() as made, patched(probe, "finish", slower):
        model = compiled(ctx)
        assert_equal(expected, train(model, CASE, ctx, 2))
    (found,) = made
    (plan,) = graphshard.plans(model)
    said = [(str(one.kind), one.size_bytes, one.us) for one in found.collectives]
    return gather_us(model), said, plan.to_json()


def test_the_first_plan_knows_the_network(pool: Pool) -> None:
    first, second = pool.run(2, slow, 0.02)
    assert first == second
    gathers_us, said, _ = first
    assert [kind for kind, _, _ in said] == ["all_gather", "reduce_scatter"]
    assert all(us > 20_000 for _, _, us in said)
    assert max(gathers_us) > 10_000
    quick, _ = pool.run(2, slow, 0.0)
    assert max(quick[0]) < 10_000


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
