"""Ranks that would run different graphs: the same error on every rank, or FSDP2 on all, in time.

Every case runs on a process group of its own: one that a rank left in the middle of a collective is
of no use afterwards.
"""

import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from between_steps import assert_clean
from divergence import blocks, caught, losses, own_mesh
from fuzz_build import sharded
from fuzz_cases import TWO_HEADS, FuzzCase, Group
from models import CASES
from parity import assert_equal, build, train
from patching import patched
from pool import Ctx, Pool, capped
from torch import Tensor

import graphshard
from graphshard.capture import fallback
from graphshard.capture.fallback import calls
from graphshard.capture.root_state import root_states_under
from graphshard.compiler import graph_compiler, planning, planning_inputs
from graphshard.planner import plan_step
from graphshard.planner.choices import reduce_buckets
from graphshard.planner.score import candidate
from graphshard.schedule.plan import StepKind

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(capped(2) == 1, reason="one rank agrees with itself"),
]

LIMIT_S = 15.0


def assert_alike(ranks: list[tuple[str, float]], text: str) -> None:
    """The same error on every rank, in time."""
    assert len({found for found, _ in ranks}) == 1, ranks
    assert text in ranks[0][0]
    assert max(took_s for _, took_s in ranks) < LIMIT_S


# -- the first step --------------------------------------------------------------------------------


def other_order(ctx: Ctx, mode: str) -> tuple[str, float]:
    model = blocks(ctx, own_mesh(ctx))
    model.order = [0, 1, 3] if ctx.rank == 1 else [0, 1, 2, 3]
    model.compile(backend="graphshard", options={"fallback": mode, "schedule": "fsdp2"})
    found = caught(lambda: losses(model, ctx, range(1)))
    assert_clean(model)
    assert graphshard.plans(model) == []
    again = caught(lambda: losses(model, ctx, range(1)))
    assert again[0] == found[0]
    return found


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_module_skipped_on_one_rank_is_an_error(pool: Pool, mode: str) -> None:
    """With "warn" too: FSDP2 itself would wait for ever for the rank that skips."""
    ranks = pool.run(2, other_order, mode)
    assert_alike(ranks, "collective 2 is rank 0: forward all_gather of blocks.2 (float32")
    assert "rank 1: forward all_gather of blocks.3" in ranks[0][0]
    assert ranks[0][0].startswith("GS702")


def reordered(original: Any) -> Any:
    """The planner lets the first reduction wait until the others have gone."""

    def choose(context: Any, own: Any, start: Any) -> Any:
        first = reduce_buckets(context.memo, own.choices)[0].groups[0]
        return candidate(context, replace(own.choices, delays=((first, 8),)))

    return choose


def unable(original: Any) -> Any:
    """No graph can issue what another one does."""
    return lambda *args: None


def side_by_side(ctx: Ctx, follows: bool) -> tuple[str, float] | None:
    """Two graphs, each rank in another one of them; of the second a plan was made that reduces two
    heads in another order. follows: it may issue what the first one does."""
    groups = (Group(("heads.1",)), Group(("heads.0",)), Group(("",)))
    model = sharded(FuzzCase(TWO_HEADS, groups, ()), replace(ctx, mesh=own_mesh(ctx)))
    model.compile(backend="graphshard", options={"fallback": "error"})

    def loss(rows: int) -> Tensor:
        first, second = model(torch.ones(rows, 3, dtype=torch.int64, device=ctx.device))
        return first.square().mean() + second.square().mean()

    loss(2).backward()
    kept = nullcontext() if follows else patched(planning, "following", unable)
    with patched(plan_step, "_chosen", reordered), kept:
        loss(3)
    first, second = (
        [p.groups[s.groups[0]].fqn for s in p.backward.of_kind(StepKind.REDUCE_ISSUE)]
        for p in graphshard.plans(model)
    )
    assert (first == second) is follows
    if follows:
        return loss(1 + ctx.rank).backward()
    return caught(lambda: loss(1 + ctx.rank).backward())


def test_graphs_side_by_side_that_reduce_in_another_order_are_an_error(pool: Pool) -> None:
    assert_alike(pool.run(2, side_by_side, False), "GS702: the ranks issue different collectives")


def test_a_graph_of_other_ops_issues_what_the_first_one_does(pool: Pool) -> None:
    pool.run(2, side_by_side, True)


def broken_on_one(ctx: Ctx, mode: str, how: str) -> tuple[str, float]:
    """Rank 1 breaks the graph, rank 0 does not; FSDP2 would not mind."""
    mesh = own_mesh(ctx)
    oracle, model = blocks(ctx, mesh), blocks(ctx, mesh)
    setattr(model, how, ctx.rank == 1)
    model.compile(backend="graphshard", options={"fallback": mode})
    if mode == "error":
        found = caught(lambda: losses(model, ctx, range(1)))
        assert_clean(model)
        return found
    expected, began = losses(oracle, ctx, range(3)), time.monotonic()
    fallback.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        actual = losses(model, ctx, range(3))
    assert all(map(torch.equal, expected, actual))
    assert_clean(model)
    assert graphshard.plans(model) == []
    assert len(graphshard.explain(model).reasons) == 4
    texts = [str(w.message) for w in seen if "whole model" in str(w.message)]
    assert len(texts) == 1, [str(w.message) for w in seen]
    return texts[0], time.monotonic() - began


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_another_graph_on_one_rank(pool: Pool, mode: str) -> None:
    ranks = pool.run(2, broken_on_one, mode, "breaks")
    assert_alike(ranks, "GS701: the ranks would issue different collectives: ")


def test_a_rank_that_dynamo_gives_up(pool: Pool) -> None:
    """A break in a loop on rank 1: eager FSDP2 runs the whole frame there, and nothing is asked."""
    (first, took_s), (second, other_s) = pool.run(2, broken_on_one, "warn", "breaks_in_loop")
    assert "GS707: rank 1 is in the model and compiles nothing" in first
    assert "GS703: rank 0 could not compile" in second
    assert "rank 1 is in the model" in second
    assert max(took_s, other_s) < LIMIT_S


def failing(ctx: Ctx, mode: str) -> tuple[str, float]:
    """A pass fails on rank 1 only."""

    def boom(program: Any) -> Any:
        raise ValueError("boom")

    mesh = own_mesh(ctx)
    oracle, model = blocks(ctx, mesh), blocks(ctx, mesh)
    model.compile(backend="graphshard", options={"fallback": mode})
    expected = losses(oracle, ctx, range(2))
    original, began = planning.PLACEMENT, time.monotonic()
    if ctx.rank == 1:
        planning.PLACEMENT = (boom,)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fallback.warn_once.cache_clear()
            if mode == "warn":
                assert all(map(torch.equal, expected, losses(model, ctx, range(2))))
                text = " ".join(str(w.message) for w in seen)
            else:
                with pytest.raises(Exception, match="boom") as error:
                    losses(model, ctx, range(1))
                text = str(error.value)
    finally:
        planning.PLACEMENT = original
    assert_clean(model)
    return text, time.monotonic() - began


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_rank_that_cannot_compile(pool: Pool, mode: str) -> None:
    (first, took_s), (second, other_s) = pool.run(2, failing, mode)
    if mode == "warn":
        assert "GS703: rank 1 could not compile graph" in first
    else:
        assert "GS709: rank 1 stopped while it compiled graph" in first
    assert "boom" in first
    assert "boom" in second
    assert max(took_s, other_s) < LIMIT_S


def unanswered(ctx: Ctx) -> str:
    """Rank 1 does something else."""
    mesh = own_mesh(ctx)
    model = blocks(ctx, mesh)
    model.compile(backend="graphshard", options={"fallback": "warn"})
    calls._prepare(model, graphshard.options.Options())
    (record,) = root_states_under(model)
    record.groups[0].root.ballots[0].limit_s = 1.0
    found = caught(lambda: losses(model, ctx, range(1))) if ctx.rank == 0 else ("", 0.0)
    dist.barrier()
    assert_clean(model)
    assert found[1] < LIMIT_S
    return found[0]


def test_a_rank_that_does_not_answer_is_named(pool: Pool) -> None:
    text, _ = pool.run(2, unanswered)
    assert "GS704: rank 1 did not come to a new graph of blocks.0, blocks.1" in text
    assert "in 1 s" in text


# -- later steps -----------------------------------------------------------------------------------


def skipped_later(ctx: Ctx, mode: str) -> tuple[str, float]:
    model = blocks(ctx, own_mesh(ctx))
    model.compile(backend="graphshard", options={"fallback": mode, "schedule": "fsdp2"})
    losses(model, ctx, range(2))
    if ctx.rank == 1:
        model.order = [0, 1, 3]
    found = caught(lambda: losses(model, ctx, range(2, 3)))
    assert_clean(model)
    return found


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_module_skipped_later_on_one_rank(pool: Pool, mode: str) -> None:
    """Rank 0 compiles nothing: it answers when its collective is late."""
    ranks = pool.run(2, skipped_later, mode)
    assert_alike(ranks, "collective 2 is rank 0: forward all_gather of blocks.2 (float32")
    assert ranks[0][0].startswith("GS702")


def same_signature(ctx: Ctx, what: str) -> list[str]:
    mesh = own_mesh(ctx)
    oracle, model = blocks(ctx, mesh), blocks(ctx, mesh)
    oracle.scale = model.scale = 0.5 if what == "op" and ctx.rank == 1 else None
    model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    expected, actual = [], []
    for step in range(4):
        rows = 3 + step * ctx.rank if what == "length" else 3
        expected += losses(oracle, ctx, range(step, step + 1), rows)
        actual += losses(model, ctx, range(step, step + 1), rows)
    assert all(map(torch.equal, expected, actual))
    assert_clean(model)
    return [plan.fingerprint for plan in graphshard.plans(model)]


@pytest.mark.parametrize("what", ["op", "length"])
def test_ranks_with_one_signature_carry_on(pool: Pool, what: str) -> None:
    """An op more on rank 1; other lengths on rank 1, which compiles anew while rank 0 does not."""
    first, second = pool.run(2, same_signature, what)
    assert len(first) == 1
    assert len(second) == (1 if what == "op" else 2)
    assert len(set(first + second)) == 1


# -- costs -----------------------------------------------------------------------------------------


def other_costs(ctx: Ctx) -> tuple[float, str, float]:
    """On rank 1 the network has a thousandth of its speed. This rank's own costs, and what runs."""
    case, own = CASES["llama"], []

    def machine_for(*args: Any) -> Any:
        machine = original(*args)
        share = 1e-3 if ctx.rank == 1 else 1.0
        slow = machine.network.intra_bytes_per_us * share
        own.append(slow)
        return replace(machine, network=replace(machine.network, intra_bytes_per_us=slow))

    expected = train(build(case, ctx), case, ctx, 2)
    model, began = build(case, ctx), time.monotonic()
    options = {"fallback": "error", "memory_budget": "1GiB"}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    original, planning_inputs.machine_for = planning_inputs.machine_for, machine_for
    try:
        assert_equal(expected, train(model, case, ctx, 2))
    finally:
        planning_inputs.machine_for = original
    assert_clean(model)
    (plan,) = graphshard.plans(model)
    return own[0], plan.to_json(), time.monotonic() - began


def test_other_costs_on_one_rank(pool: Pool) -> None:
    """The lowest rank's costs are everybody's, so that all plan the same."""
    (own, first, took_s), (others, second, other_s) = pool.run(2, other_costs)
    assert own != others
    assert first == second
    assert max(took_s, other_s) < LIMIT_S


def other_plan(ctx: Ctx) -> tuple[str, str]:
    """On rank 1 the planner chooses otherwise: what this rank proposes, and what runs."""
    case, own = CASES["llama"], []

    def recorded(original: Any) -> Any:
        def agree(ballots: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
            own.append(plan.to_json())
            return original(ballots, plan, *args, **kwargs)

        return agree

    expected = train(build(case, ctx), case, ctx, 2)
    model = build(case, ctx)
    options = {"fallback": "error", "memory_budget": "1GiB"}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, GRAPHSHARD_CACHE_DIR=folder),  # no plan of the other rank
        patched(plan_step, "_chosen", reordered) if ctx.rank == 1 else nullcontext(),
        patched(graph_compiler, "agree_on_plan", recorded),
    ):
        assert_equal(expected, train(model, case, ctx, 2))
    (plan,) = graphshard.plans(model)
    return own[0], plan.to_json()


def test_the_lowest_ranks_plan_runs_on_all(pool: Pool) -> None:
    (own, first), (others, second) = pool.run(2, other_plan)
    assert own != others
    assert first == second


def launched_twice(ctx: Ctx) -> None:
    def run() -> Any:
        torch._dynamo.reset()
        case = CASES["llama"]
        model = build(case, ctx)
        options = {"fallback": "error", "memory_budget": "2GiB"}
        model.compile(backend="graphshard", fullgraph=True, options=options)
        case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
        return graphshard.plans(model)[0].forward

    def searched(problem: Any) -> Any:
        raise AssertionError("the plan was on disk")

    first = run()
    original, planning.plan_best = planning.plan_best, searched
    try:
        assert run() == first
    finally:
        planning.plan_best = original


def test_a_second_launch_does_not_search(pool: Pool) -> None:
    pool.run(2, launched_twice)


# -- every step ------------------------------------------------------------------------------------


def one_rank_only(ctx: Ctx) -> tuple[str, float]:
    """Rank 0 runs a module once more than rank 1; both know the graph."""
    mesh = own_mesh(ctx)
    model = blocks(ctx, mesh)
    for block in model.blocks:
        block.compile(backend="graphshard", options={"verify": "every", "promote": False})
    losses(model, ctx, range(2))
    model.order = [0, 1, 2, 2, 3] if ctx.rank == 0 else [0, 1, 2, 3]
    found = caught(lambda: losses(model, ctx, range(2, 3)))
    assert_clean(model)
    return found


def test_a_module_run_on_one_rank_only_is_named(pool: Pool) -> None:
    ranks = pool.run(2, one_rank_only)
    assert_alike(ranks, "rank 0 runs blocks.2; rank 1 runs blocks.3")
    assert ranks[0][0].startswith("GS705")


def checked(ctx: Ctx, verify: str) -> float:
    case = CASES["llama"]
    model = build(case, ctx)
    expected = train(build(case, ctx), case, ctx, 4)
    options = {"fallback": "error", "verify": verify}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    assert_equal(expected, train(model, case, ctx, 4))
    (ballot,) = root_states_under(model)[0].groups[0].root.ballots
    return ballot.calls


@pytest.mark.parametrize(("verify", "calls"), [("off", 0), ("compile", 0), ("every", 4)])
def test_what_verify_asks_for(pool: Pool, verify: str, calls: int) -> None:
    assert pool.run(2, checked, verify) == [calls, calls]
