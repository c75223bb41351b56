"""Models whose ops depend on the data: packed sequences, dropped layers, rows for experts.

Each count is a graph of its own, and each rank has counts of its own at each step. Eager FSDP2 is
the oracle, bit by bit.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.capture import fallback
from graphshard.cost import presets
from graphshard.runtime import probe

pytestmark = pytest.mark.dist

DIM, ROWS, STRICT = 8, 12, {"fallback": "error"}


class Packed(NamedTuple):
    """What frameworks hand from block to block: lengths as a list, the largest as a number."""

    lengths: list[int]
    most: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        parts = self.qkv(x).split(packed.lengths)
        return x + self.out(torch.cat([_attended(part) for part in parts])) / packed.most


def _attended(part: Tensor) -> Tensor:
    q, k, v = part.chunk(3, -1)
    return (q @ k.T).softmax(-1) @ v


class Dropping(nn.Module):
    """Runs the blocks that `keeps` names."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, given: Any, keeps: tuple[bool, ...] = ()) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not keeps or keeps[number]:
                x = block(x, given)
        return self.head(x)


class Routed(nn.Module):
    """Experts, each with as many rows as the router gives it: a graph break for Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, given: None) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=2).tolist()
        pairs = zip(self.experts, x[order].split(counts), strict=True)
        y = torch.cat([expert(rows) for expert, rows in pairs])
        return x + torch.zeros_like(x).index_copy(0, order, y) * weight[:, None]


def pair(ctx: Ctx, block: Callable[[], nn.Module], depth: int) -> Iterator[nn.Module]:
    for _ in range(2):
        torch.manual_seed(0)
        model = Dropping(block, depth).to(ctx.device)
        for inner in model.blocks:
            fully_shard(inner, mesh=ctx.mesh)
        yield fully_shard(model, mesh=ctx.mesh)


def compared(
    ctx: Ctx, models: Iterator[nn.Module], inputs: list[tuple[Any, ...]], options: dict[str, str]
) -> tuple[list[str], nn.Module]:
    """What was said while the second model trained as the first one does in eager mode."""
    fallback.warn_once.cache_clear()
    oracle, model = models
    model.compile(backend="graphshard", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, given in enumerate(inputs):
            torch.manual_seed(2 * step + ctx.rank)
            x = torch.randn(ROWS, DIM, device=ctx.device)
            want, got = (net(x, *given).square().mean() for net in (oracle, model))
            assert torch.equal(want, got), step
            for loss in (want, got):
                loss.backward()
            for (name, one), other in zip(
                oracle.named_parameters(), model.parameters(), strict=True
            ):
                assert (one.grad is None) == (other.grad is None), name
                if one.grad is not None:
                    assert torch.equal(one.grad.to_local(), other.grad.to_local()), (step, name)
    ours = [w for w in caught if issubclass(w.category, graphshard.GraphshardWarning)]
    return [str(w.message) for w in ours], model


def packs(counts: list[int]) -> list[tuple[Packed]]:
    found = []
    for step, count in enumerate(counts):
        cuts = sorted(random.Random(10 * step + count).sample(range(1, ROWS), count - 1))
        lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, ROWS], strict=True)]
        found.append((Packed(lengths, max(lengths)),))
    return found


def packed(ctx: Ctx, counts: tuple[list[int], list[int]], limit: int) -> tuple[list[str], int]:
    """counts: sequences at each step, by rank."""
    with torch._dynamo.config.patch(recompile_limit=limit):
        said, model = compared(ctx, pair(ctx, Block, 2), packs(counts[ctx.rank]), STRICT)
    assert len({plan.fingerprint for plan in graphshard.plans(model)}) == 1
    assert graphshard.explain(model).captured == 3
    return said, len(graphshard.plans(model))


def test_ranks_with_other_numbers_of_sequences_run_graphs_beside_each_other(pool: Pool) -> None:
    for said, plans in pool.run(2, packed, ([2, 2, 3, 2], [2, 2, 2, 3]), 8):
        assert said == []
        assert plans >= 3


def on_a_slow_network(ctx: Ctx) -> None:
    with (
        patched(probe, "_elapsed_us", lambda us: lambda *args: us(*args) and 5e4),
        patched(presets, "_network", slower),
    ):
        packed(ctx, ([2, 2, 3], [2, 2, 2]), 8)


def slower(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: replace(original(*args), intra_bytes_per_us=1.0)


def test_merged_and_split_gathers_are_followed(pool: Pool) -> None:
    pool.run(2, on_a_slow_network)


def test_ranks_that_compile_apart_go_on_beyond_dynamos_limit(pool: Pool) -> None:
    """Eager FSDP2 could not run beside the other rank's graph."""
    for said, plans in pool.run(2, packed, ([3, 2, 4], [2, 3, 3]), 2):
        assert plans > 2
        (beyond,) = (text for text in said if "ranks compile at different steps: " in text)
        assert "Dynamo's limit of 2 variants of one frame is reached" in beyond


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, given: None) -> Tensor:
        return x + self.up(x).relu()


def dropped(ctx: Ctx) -> tuple[list[str], int]:
    draws = random.Random(0)
    steps = [(None, tuple(draws.random() < 0.7 for _ in range(4))) for _ in range(9)]
    with torch._dynamo.config.patch(recompile_limit=2):
        said, model = compared(ctx, pair(ctx, Plain, 4), steps, {})
    return said, graphshard.explain(model).captured


def test_beyond_the_limit_dropped_layers_run_in_graphs_of_blocks(pool: Pool) -> None:
    for said, captured in pool.run(2, dropped):
        assert captured >= 4, said
        assert any("limit is reached" in text for text in said), said
        (reached,) = (text for text in said if "limit is reached" in text)
        assert "did not run inside a graph because Dynamo's recompile limit is reached" in reached
        assert len(said) == 2  # the other one when the last variant was compiled


def routed(ctx: Ctx) -> list[str]:
    said, _ = compared(ctx, pair(ctx, Routed, 3), [(None,)] * 5, {})
    return said


def test_a_break_in_each_of_many_blocks_is_said_once(pool: Pool) -> None:
    for said in pool.run(2, routed):
        (text,) = said
        assert text.startswith("graphshard: 4 groups ((root), blocks.0, blocks.1, blocks.2) did")
        assert "test_counts.py" in text
