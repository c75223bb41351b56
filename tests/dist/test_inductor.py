"""Compiled compute: within tolerance of eager FSDP2, few regions, each compiled once."""

from collections.abc import Iterator

import pytest
import test_parity
import test_semantics
import torch
from models import CASES, LENGTH, Llama, shard_blocks
from pool import Ctx, Pool
from test_semantics import Step

import graphshard


@pytest.fixture(scope="module")
def inductor() -> Iterator[Pool]:
    with Pool("inductor") as workers:
        yield workers


@pytest.mark.parametrize("name", list(CASES))
def test_models_follow_eager_fsdp2(inductor: Pool, name: str) -> None:
    inductor.run(2, test_parity.parity_case, name, "in place", 5, {}, timeout_s=300)


def regions(ctx: Ctx, depth: int) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    model = shard_blocks(("blocks",), Llama(depth), ctx.mesh)
    model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    return graphshard.explain(model).regions


def test_distinct_regions_do_not_grow_with_depth(inductor: Pool) -> None:
    few, many = (
        list(inductor.run(2, regions, depth, timeout_s=300)[0].values()) for depth in (5, 9)
    )
    assert len(few) == len(many) == 1
    assert many[0][0] >= few[0][0] + 8  # a region for each block, forward and backward
    assert few[0][1] == many[0][1] <= 20


@pytest.mark.parametrize("step", test_semantics.STEPS, ids=lambda s: s.__name__)
def test_semantics_are_those_of_fsdp2(inductor: Pool, step: Step) -> None:
    inductor.run(2, test_semantics.both, step, timeout_s=300)
