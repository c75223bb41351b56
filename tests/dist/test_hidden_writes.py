"""Shards written to in ways that no version counts, where a gather may be of the values before.

Two things are gathered early: the opening of a forward by the optimizer's step
(`overlap_optimizer`), and what a plan keeps between micro-steps. Drawn are the way of writing, the
moment, and whether all ranks' values change or one's only. Eager FSDP2 is the oracle, bit by bit.
One model goes through several ways in turn. `GRAPHSHARD_WRITES=70 GRAPHSHARD_WRITES_SEED=1` draws
more models than CI's 4.
"""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from models import CASES
from parity import sgd, twin
from pool import Ctx, Pool
from torch import Tensor, nn
from writes import WRITES

pytestmark = pytest.mark.dist
LLAMA = CASES["llama"]
COUNT = int(os.environ.get("GRAPHSHARD_WRITES", "4"))
SEED = os.environ.get("GRAPHSHARD_WRITES_SEED")
STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {"overlap_optimizer": True},
    "kept": {"memory_budget": "1GiB", "reshard": "auto", "micro_steps": 2},
    "both": {"overlap_optimizer": True, "memory_budget": "1GiB", "micro_steps": 2},
}


@dataclass(frozen=True)
class Writes:
    """For some steps. moments: of each step, in which something is written; `only`: the one rank
    whose values change, or -1."""

    way: str
    moments: tuple[str, ...]
    only: int


@dataclass(frozen=True)
class Case:
    options: str
    writes: tuple[Writes, ...]


MOMENTS = ("after step", "between micro-steps", "around evaluation", "after zero_grad")
writes = st.builds(
    Writes,
    way=st.sampled_from(sorted(WRITES)),
    moments=st.lists(st.sampled_from(MOMENTS), min_size=1, max_size=2, unique=True).map(tuple),
    only=st.sampled_from([-1, 0, 1]),
)
cases = st.builds(
    Case,
    options=st.sampled_from(sorted(OPTIONS)),
    writes=st.lists(writes, min_size=3, max_size=3).map(tuple),
)
THROUGH_DATA = Writes("through_data", ("after step",), -1)
THROUGH_FOREACH = Writes("through_foreach", ("around evaluation",), 1)
THROUGH_NUMPY = Writes("through_numpy", ("between micro-steps",), 0)


@pytest.mark.slow
@pytest.mark.timeout(COUNT * 60)
def test_equals_eager(pool: Pool) -> None:
    @drawing(COUNT, SEED)
    @given(cases)
    @example(Case("ahead", (THROUGH_DATA, THROUGH_FOREACH)))
    @example(Case("kept", (THROUGH_NUMPY,)))
    def compare(case: Case) -> None:
        # What is compiled depends on the options alone: cases that share them share it.
        pool.run(2, compared, case, timeout_s=60.0, keeps_compiled=True)

    compare()


def compared(ctx: Ctx, case: Case) -> None:
    oracle, model = twin(LLAMA, ctx)
    options = {"compute": "aten", "fallback": "error", **OPTIONS[case.options]}
    model.compile(backend="graphshard", options=options)
    expected, actual = (losses(net, ctx, case) for net in (oracle, model))
    for step, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert torch.equal(want, got), f"loss {step}: {want.item()} {got.item()}"
    for (name, want), got in zip(oracle.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(want.to_local(), got.to_local()), name


def losses(model: nn.Module, ctx: Ctx, case: Case) -> list[Tensor]:
    optimizer = sgd(model.parameters())
    found: list[Tensor] = []
    for writes in case.writes:
        for _ in range(STEPS):
            found += step(model, optimizer, ctx, writes)
    return found


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ctx: Ctx, writes: Writes
) -> list[Tensor]:
    """The losses of two micro-steps, and of an evaluation behind them."""
    found: list[Tensor] = []

    def forward(number: int) -> Tensor:
        loss = LLAMA.loss(model, LLAMA.batch(number, ctx.rank, ctx.device))
        found.append(loss.detach().clone())
        return loss

    def write(moment: str, factor: float) -> None:
        changes = writes.only in (-1, ctx.rank)
        if moment in writes.moments:
            WRITES[writes.way](model, factor if changes else 1.0)

    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        forward(micro).backward()
        if micro == 0:
            write("between micro-steps", 0.875)
    optimizer.step()
    write("after step", 0.75)
    optimizer.zero_grad()
    write("after zero_grad", 1.125)
    write("around evaluation", 0.5)  # as where averaged weights are swapped in
    model.reshard()
    with torch.no_grad():
        forward(99)
    model.reshard()
    write("around evaluation", 2.0)
    return found
