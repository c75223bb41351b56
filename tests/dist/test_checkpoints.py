"""Activation checkpointing of every kind: graphshard against eager FSDP2, bit by bit.

CI runs the same drawn cases each time; `GRAPHSHARD_FUZZ_CHECKPOINTS=300` and
`GRAPHSHARD_FUZZ_SEED=1000` run 300 others. What was found stands below by name.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoint_cases import (
    DIFFERS,
    EQUAL,
    REFUSED,
    WIDTH,
    CheckpointCase,
    CheckpointOutcome,
    build,
    drawn,
    run_checkpoint_case,
    steps,
)
from pool import Ctx, Pool, capped
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as hook_based
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_FUZZ_CHECKPOINTS", "16"))
FIRST = int(os.environ.get("GRAPHSHARD_FUZZ_SEED", "0"))
LIMIT_S = 120.0  # of one case; the usual one takes two seconds
MOST_REFUSED = 0.3  # of the cases


def outcome_of(pool: Pool, case: CheckpointCase) -> CheckpointOutcome:
    return max(pool.run(2, run_checkpoint_case, case, timeout_s=LIMIT_S), key=lambda o: len(o.why))


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * LIMIT_S))
@pytest.mark.skipif(capped(2) < 2, reason="needs 2 ranks")
def test_drawn_cases_equal_eager(pool: Pool) -> None:
    tally: Counter[str] = Counter()
    for number in range(FIRST, FIRST + CASES):
        case = drawn(number)
        outcome = outcome_of(pool, case)
        tally.update([outcome.verdict])
        tally.update({"groups in a graph": outcome.in_graph, "groups": outcome.groups})
        tally.update({"replaced": outcome.replaced, "repeats": outcome.repeats})
        assert outcome.verdict != DIFFERS, f"seed {number}, {case}: {outcome.why}"
    print(dict(tally))
    assert tally["groups in a graph"] > 0
    assert tally["replaced"] > 0
    assert tally[REFUSED] <= MOST_REFUSED * CASES, tally


# A recomputation that was taken for a failed forward reset the whole root in mid-backward.
BLOCKS = CheckpointCase(layers=3, compiled="blocks", flavour="plain")
FOUND = {
    "blocks, two forwards and one backward": replace(BLOCKS, calls=2),
    "blocks, replicas, all-reduce in the last micro-step": replace(
        BLOCKS, replicated=True, micro="all_reduce"
    ),
    "a break in the root's loop": CheckpointCase(breaks="loop", nested=True, reshard=True),
    "breaks in compiled blocks": replace(BLOCKS, breaks="block", calls=2, frozen=True),
    # The storage of a parameter that a graph had saved was freed: a segmentation fault, at times.
    "hooks, sharded twice, two calls": CheckpointCase(
        flavour="hooks", attends=True, nested=True, calls=2, reshard=True
    ),
    "hooks, blocks": CheckpointCase(flavour="hooks", compiled="blocks", micro="sync"),
    # What was gathered ahead for a block was an op less in the region that calls it again.
    "selective, breaks between compiled blocks": CheckpointCase(
        layers=3, flavour="selective", compiled="both", breaks="loop", reshard=True
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_cases_equal_eager(pool: Pool, name: str) -> None:
    outcome = outcome_of(pool, FOUND[name])
    assert outcome.verdict == EQUAL, outcome.why


def left_by_hooks(ctx: Ctx) -> dict[str, str]:
    model = build(ctx, CheckpointCase(flavour="hooks"))
    model.compile(backend="graphshard")
    steps(model, ctx, CheckpointCase(), 1)
    return graphshard.explain(model).reasons


def test_checkpoints_by_hooks_are_left_to_eager_with_the_reason(pool: Pool) -> None:
    for reasons in pool.run(2, left_by_hooks):
        for block in ("blocks.0", "blocks.1"):
            assert "checkpointing by hooks" in reasons[block]
            assert "torch.utils.checkpoint" in reasons[block]


class Boom(Exception):
    pass


class Ends(nn.Module):
    """Raises when it is called for the `at`-th time; `torch.utils.checkpoint` calls it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.calls, self.at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).relu()
        self._count()
        return self.last(x)

    @torch._dynamo.disable
    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Boom


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Ends()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=False)


def failed_recomputation(ctx: Ctx, compiled: str) -> None:
    """Eager FSDP2 needs `reset_iter_state` then."""
    seen: list[Any] = []
    for part in ("", compiled):
        torch.manual_seed(0)
        model: Any = Recomputes().to(ctx.device)
        for child in model.children():
            graphshard.fully_shard(child, mesh=ctx.mesh)
        graphshard.fully_shard(model, mesh=ctx.mesh)
        if part:
            model.get_submodule(part if part == "block" else "").compile(backend="graphshard")

        def step(model: Any = model) -> None:
            model.zero_grad()
            x = torch.ones(2, WIDTH, device=ctx.device)
            (model(x) + model(2 * x)).square().mean().backward()

        for _ in range(2):
            step()
        model.block.at = model.block.calls + 4  # the second recomputation
        with pytest.raises(Boom):
            step()
        model.reset_iter_state()
        step()
        seen.append([p.grad.to_local().clone() for p in model.parameters()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("compiled", ["root", "block"])
def test_a_step_after_a_recomputation_that_failed(pool: Pool, compiled: str) -> None:
    pool.run(2, failed_recomputation, compiled)


class Chunked(nn.Module):
    """A head that is called apart, piece by piece, where `apart` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.apart = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if self.apart else self.head(x)


def chunked_loss(ctx: Ctx, by_hooks: bool) -> None:
    """One group of two modules, of which one is called alone after the root's forward."""
    seen: list[Any] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Chunked().to(ctx.device)
        for block in model.blocks:
            if by_hooks:
                hook_based(block)
            graphshard.fully_shard(block, mesh=ctx.mesh)
        graphshard.fully_shard([model.norm, model.head], mesh=ctx.mesh)
        graphshard.fully_shard(model, mesh=ctx.mesh)
        if compiled:
            model.compile(backend="graphshard")
        for step in range(4):
            torch.manual_seed(step)
            model.apart = step % 2 == 1
            out = model(torch.randn(4, WIDTH, device=ctx.device))
            if model.apart:
                leaf = out.detach().requires_grad_()
                for chunk in leaf.chunk(2):
                    model.head(chunk).square().mean().backward()
                out.backward(leaf.grad)
            else:
                out.square().mean().backward()
        seen.append([p.grad.to_local().clone() for p in model.parameters()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("by_hooks", [False, True])
def test_a_group_of_which_one_module_is_called_apart(pool: Pool, by_hooks: bool) -> None:
    pool.run(2, chunked_loss, by_hooks)


class GathersItself(nn.Module):
    """Its forward gathers the weight of a group that it does not call, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False)
        weight = self.head.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return F.linear(hidden, whole)


def mesh_beside_random_states(ctx: Ctx) -> None:
    """Both are saved for backward."""
    seen: list[list[Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = GathersItself().to(ctx.device)
        for child in model.children():
            graphshard.fully_shard(child, mesh=ctx.mesh)
        graphshard.fully_shard(model, mesh=ctx.mesh)
        if compiles:
            model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
        for step in range(2):
            torch.manual_seed(step + ctx.rank)
            model(torch.ones(2, WIDTH, device=ctx.device)).square().mean().backward()
        seen.append([p.grad.to_local() for p in model.parameters()])
    assert all(map(torch.equal, *seen))


def test_a_users_own_gather_beside_a_random_checkpoint(pool: Pool) -> None:
    pool.run(2, mesh_beside_random_states)
