"""Which graph each rank runs at each forward: each has batches of lengths of its own.

What backward computes again is decided with the first graph, from collectives that are run before
it; a rank that compiles alone for another length follows. Assumed: graphs of the same ops that
compute the same again issue the same collectives, whatever their lengths. Drawn are the lengths by
rank and step, evaluations between them, and who tunes. Eager FSDP2 is the oracle, bit by bit.
`GRAPHSHARD_LENGTHS=50 GRAPHSHARD_LENGTHS_SEED=1` draws more than CI's 3.

A length of 1 has a graph of other ops, which issues what the others do.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from launches import first_launch
from models import CASES
from parity import build, sgd
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn

import graphshard
from graphshard.cost import presets
from graphshard.runtime import probe

pytestmark = pytest.mark.dist

LLAMA = CASES["llama"]
COUNT = int(os.environ.get("GRAPHSHARD_LENGTHS", "3"))
SEED = os.environ.get("GRAPHSHARD_LENGTHS_SEED")
SLOW_US = 5e4  # a first collective takes this on a network that is said to be slow


@dataclass(frozen=True)
class Lengths:
    """steps: the length of the batch on each of two ranks, and whether it is an evaluation.

    slow: what the first collectives say of the network. tunes: steps are measured as well.
    """

    steps: tuple[tuple[int, int, bool], ...]
    slow: bool
    tunes: bool


length = st.sampled_from([1, 2, 3, 4, 6])
steps = st.tuples(length, length, st.sampled_from([False, False, True]))
lengths = st.builds(
    Lengths,
    steps=st.lists(steps, min_size=4, max_size=9).map(tuple),
    slow=st.booleans(),
    tunes=st.booleans(),
)
ALONE = Lengths(((6, 6, False), (4, 6, False), (6, 2, False), (3, 3, False)), True, False)
APART = Lengths(
    ((6, 2, False), (4, 6, False), (2, 3, True), (6, 4, False), (3, 6, False)),
    slow=True,
    tunes=True,
)


@pytest.mark.slow
@pytest.mark.timeout(COUNT * 60)
def test_equals_eager(pool: Pool) -> None:
    again: list[int] = []

    @drawing(COUNT, SEED)
    @given(lengths)
    @example(ALONE)
    @example(APART)
    def compare(case: Lengths) -> None:
        again.extend(pool.run(2, compared, case, timeout_s=60.0))

    compare()
    assert max(again), "nothing was ever computed again"


def said(case: Lengths) -> Any:
    """What a first collective takes, if it is run."""

    def us(original: Callable[..., float]) -> Callable[..., float]:
        def call(*args: Any) -> float:
            return original(*args) and SLOW_US

        return call

    return patched(probe, "_elapsed_us", us) if case.slow else nullcontext()


@first_launch
def compared(ctx: Ctx, case: Lengths) -> int:
    """How many groups are computed again in the graphs that train."""
    oracle, model = build(LLAMA, ctx), build(LLAMA, ctx)
    options = {"fallback": "error", "compute": "aten", "replan_after": None if case.tunes else 0}
    slower = patched(presets, "_network", _slower) if case.slow else nullcontext()
    with said(case), slower:
        model.compile(backend="graphshard", fullgraph=True, dynamic=False, options=options)
        pairs = zip(losses(oracle, ctx, case), losses(model, ctx, case), strict=True)
        for number, (want, got) in enumerate(pairs):
            assert torch.equal(want, got), f"loss {number}: {want.item()} {got.item()}"
    for (name, want), got in zip(oracle.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(want.to_local(), got.to_local()), name
    plans = [plan for plan in graphshard.plans(model) if plan.backward is not None]
    assert len({plan.fingerprint for plan in plans}) <= 1
    return max((len(plan.recompute.activations) for plan in plans), default=0)


def _slower(original: Callable[..., Any]) -> Callable[..., Any]:
    """The preset's network, for ranks that run no first collectives."""
    return lambda *args: replace(original(*args), intra_bytes_per_us=1.0)


def losses(model: nn.Module, ctx: Ctx, case: Lengths) -> Iterator[Tensor]:
    optimizer = sgd(model.parameters())
    for number, (*cuts, evaluates) in enumerate(case.steps):
        batch = tuple(t[:, : cuts[ctx.rank]] for t in LLAMA.batch(number, ctx.rank, ctx.device))
        if evaluates:
            with torch.no_grad():
                loss = LLAMA.loss(model, batch)
            model.reshard()
            yield loss.clone()
            continue
        loss = LLAMA.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach().clone()
