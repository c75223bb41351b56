"""A plan that moves reductions to a process group of their own, on real ranks."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from models import CASES
from parity import assert_equal, build, train
from patching import patched
from pool import Ctx, Pool

import graphshard
from graphshard.cost import presets
from graphshard.fsdp2 import fsdp_groups, states_under
from graphshard.fsdp2.versions import MAY_REDUCE_APART
from graphshard.planner import separate_group

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not MAY_REDUCE_APART, reason="torch 2.13 brought it"),
]
PLENTY = {"fallback": "error", "memory_budget": "1000 GiB"}


@contextmanager
def wanted(worth: float = 0.0) -> Iterator[None]:
    """On a CPU launches are not hidden; here it is said that they are."""

    def said(original: Any) -> Any:
        return lambda *args: replace(original(*args), concurrent=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, GRAPHSHARD_CACHE_DIR=folder),  # plans depend on WORTH
        patched(presets, "_network", said),
        patched(separate_group, "WORTH", lambda _: worth),
    ):
        yield


def compiled(model: Any, **options: Any) -> Any:
    model.compile(backend="graphshard", fullgraph=True, options={**PLENTY, **options})
    return model


def places(model: Any) -> tuple[list[Any], list[Any]]:
    """Process groups of gathers and of reductions."""
    groups = [g for state in states_under(model) for g in fsdp_groups(state)]
    return (
        list(dict.fromkeys(g.gather_process_group for g in groups)),
        list(dict.fromkeys(g.reduce_process_group for g in groups)),
    )


def moved(ctx: Ctx) -> None:
    case = CASES["llama"]
    expected = train(build(case, ctx), case, ctx, 5)
    with wanted():
        model = compiled(build(case, ctx))
        assert_equal(expected, train(model, case, ctx, 5))
    assert graphshard.plans(model)[0].reduces_apart
    (gathers,), (reductions,) = places(model)
    assert gathers is not reductions


def test_no_bit_changes_and_one_group_serves_all(pool: Pool) -> None:
    pool.run(2, moved)


def left(ctx: Ctx) -> None:
    """What the user chose stays, and nothing moves where ranks do not agree on plans."""
    case = CASES["llama"]
    expected = train(build(case, ctx), case, ctx, 3)
    with wanted():
        own = build(case, ctx)
        own.set_separate_reduce_scatter_group()
        before = places(own)
        assert_equal(expected, train(compiled(own), case, ctx, 3))
        alone = compiled(build(case, ctx), verify="off")
        assert_equal(expected, train(alone, case, ctx, 3))
    assert places(own) == before
    assert not graphshard.plans(own)[0].reduces_apart
    gathers, reductions = places(alone)
    assert gathers == reductions


def test_the_users_choice_stays(pool: Pool) -> None:
    pool.run(2, left)


def other_length(ctx: Ctx) -> None:
    """One rank compiles for another batch: it makes no process group alone."""
    case = CASES["llama"]
    with wanted(worth=2.0):
        model = compiled(build(case, ctx))
        train(model, case, ctx, 1)
    with wanted():
        batch = case.batch(1, ctx.rank, ctx.device)
        if ctx.rank == 1:
            batch = tuple(tensor[:1] for tensor in batch)
        case.loss(model, batch).backward()
    gathers, reductions = places(model)
    assert gathers == reductions


def test_no_rank_makes_a_process_group_alone(pool: Pool) -> None:
    pool.run(2, other_length, timeout_s=60)


def by_default(ctx: Ctx) -> None:
    case = CASES["llama"]
    with patched(separate_group, "WORTH", lambda _: 0.0):
        model = compiled(build(case, ctx))
        train(model, case, ctx, 1)
    assert not graphshard.plans(model)[0].reduces_apart


def test_not_with_gloo(pool: Pool) -> None:
    pool.run(2, by_default)
