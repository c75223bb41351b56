"""Forwards that Dynamo gives up: they run through eager FSDP2, and say why.

It refuses some by itself (`Unsupported`); of others it fails with an error of its own, which plain
`torch.compile` raises.
"""

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from between_steps import assert_sharded
from drawing import drawing
from heads import inputs, one_step
from hypothesis import given
from hypothesis import strategies as st
from models import shard_blocks
from parity import assert_same
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_FUZZ_UNTRACEABLE", "4"))
SEED = os.environ.get("GRAPHSHARD_FUZZ_SEED")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Stack(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Refusing(Stack):
    """Raises while it is traced. Dynamo cannot go on after that: it gives up the whole call."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if torch.compiler.is_compiling():
            raise ValueError("not under a compiler")
        return x


Makes = Sequence[Callable[[], nn.Module]]


def sharded(ctx: Ctx, makes: Makes, whole: type[Stack] = Stack) -> nn.Module:
    """makes: of each block, which is a group."""
    torch.manual_seed(0)
    return shard_blocks(("blocks",), whole(make() for make in makes).to(ctx.device), ctx.mesh)


def refused(ctx: Ctx) -> None:
    oracle, model = (sharded(ctx, [Block] * 3, Refusing) for _ in range(2))
    model.compile(backend="graphshard")
    for seed in range(3):
        assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
        assert_sharded(model)
    report = graphshard.explain(model)
    assert report.captured == 3
    assert list(report.reasons) == ["(root)"]
    assert "test_untraceable.py" in report.reasons["(root)"]
    for plan in graphshard.plans(model):
        left_out = {group.fqn: group.cause for group in plan.left_out}
        assert left_out.pop("(root)") == report.reasons["(root)"]
        assert len(plan.groups) + len(left_out) == 3
        assert set(left_out.values()) <= {""}


def test_a_forward_that_cannot_be_traced_leaves_its_blocks_compiled(pool: Pool) -> None:
    pool.run(2, refused)


def twice(x: Tensor) -> Tensor:
    """An op that cannot run without data."""
    if not hasattr(torch.ops.graphshard_tests, "twice"):
        made = torch.library.custom_op(
            "graphshard_tests::twice",
            lambda x: x * 2,
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
        )
        made.register_autograd(lambda ctx, grad: grad * 2)
    return torch.ops.graphshard_tests.twice(x)  # type: ignore[no-any-return]


def prefers(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class NoFake(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(twice(self.a(x)))


class OwnPolicy(Block):
    def forward(self, x: Tensor) -> Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(prefers)

        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class TwoContexts(Block):
    """Of a block with two of them Dynamo loses count where `super()` is called inside."""

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext(), torch.no_grad():
            y = super().forward(x)
        return super().forward(x) + y


class Wrong(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x)  # of another size


def goes_on(ctx: Ctx, middle: type[nn.Module]) -> list[str]:
    oracle, model = (sharded(ctx, [Block, middle, Block]) for _ in range(2))
    model.compile(backend="graphshard")
    with warnings.catch_warnings(record=True) as said:
        for seed in range(3):
            assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
            assert_sharded(model)
    torch._dynamo.reset()  # its limit is of all models together
    strict = sharded(ctx, [Block, middle, Block])
    strict.compile(backend="graphshard", options={"fallback": "error"})
    with pytest.raises(graphshard.CaptureError, match=r"test_untraceable\.py"):
        one_step(strict, ctx, 0)
    assert_sharded(strict)
    return [str(w.message) for w in said if w.category is graphshard.GraphshardWarning]


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (NoFake, "RuntimeError: There was no fake impl registered"),
        (OwnPolicy, "NotImplementedError: checkpoint not implemented"),
        (TwoContexts, "AssertionError: expected len(self.block_stack) == 1"),
    ],
)
def test_where_dynamo_fails(pool: Pool, middle: type[nn.Module], why: str) -> None:
    for said in pool.run(2, goes_on, middle):
        assert said
        assert all("test_untraceable.py" in text and why in text for text in said)


class MayBreak(Block):
    """Alike but for whether its graph breaks."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x)


def some_break(ctx: Ctx, which: Collection[int], how: str, count: int = 4) -> set[int]:
    """The blocks that are not in a graph."""
    makes = [partial(MayBreak, place in which) for place in range(count)]
    oracle, model = (sharded(ctx, makes) for _ in range(2))
    for module in [model] if how == "whole" else model.blocks:
        module.compile(backend="graphshard", options={"promote": False})
    for seed in range(4):
        assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
        assert_sharded(model)
    reasons = graphshard.explain(model).reasons
    return {place for place in range(count) if f"blocks.{place}" in reasons}


@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("which", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
def test_blocks_that_break_leave_others_of_their_class(
    pool: Pool, which: set[int], how: str
) -> None:
    for outside in pool.run(2, some_break, which, how):
        assert outside == which


@drawing(CASES, SEED)
@given(which=st.sets(st.integers(0, 6)), how=st.sampled_from(["whole", "blocks"]))
def test_drawn_blocks_break(pool: Pool, which: set[int], how: str) -> None:
    """More of them than leave their class: then others may be outside, too."""
    for outside in pool.run(2, some_break, which, how, 7):
        assert outside == which or (outside > which and len(which) > 4)


LOGGER = logging.getLogger("of a model")


class Logs(Block):
    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("a block of %s", x.shape)
        return super().forward(x)


def logs(ctx: Ctx, level: int) -> tuple[int, int]:
    """How many groups are in a graph, and how many lines there are."""
    oracle, model = (sharded(ctx, [Block, Logs, Block]) for _ in range(2))
    model.compile(backend="graphshard")
    seen: list[logging.LogRecord] = []
    LOGGER.setLevel(level)
    with patched(LOGGER, "handle", lambda _: seen.append):
        for seed in range(3):
            assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
    return graphshard.explain(model).captured, len(seen)


@pytest.mark.parametrize(
    ("level", "expected"), [(logging.INFO, (4, 0)), (logging.DEBUG, (2, 2 * 3))]
)
def test_log_calls_that_are_off_break_nothing(
    pool: Pool, level: int, expected: tuple[int, int]
) -> None:
    for found in pool.run(2, logs, level):
        assert found == expected


def levels_change(ctx: Ctx, levels: Sequence[int]) -> None:
    """A level for each step."""
    oracle, model = (sharded(ctx, [Logs] * 3) for _ in range(2))
    model.compile(backend="graphshard")
    for seed, level in enumerate(levels):
        LOGGER.setLevel(level)
        lines: list[int] = []
        steps = []
        for net in (oracle, model):
            seen: list[logging.LogRecord] = []
            with patched(LOGGER, "handle", lambda _, seen=seen: seen.append):
                steps.append(one_step(net, ctx, seed))
            lines.append(len(seen))
        assert_same(*steps)
        eager, ours = lines
        assert ours == eager or (ours < eager and logging.INFO in levels[:seed])


@drawing(CASES, SEED)
@given(levels=st.lists(st.sampled_from([logging.INFO, logging.DEBUG]), min_size=2, max_size=5))
def test_drawn_levels(pool: Pool, levels: list[int]) -> None:
    """Lines are lost only in what was compiled while they were off, and no number changes."""
    pool.run(2, levels_change, levels)


def is_wrong(ctx: Ctx) -> None:
    model = sharded(ctx, [Block, Wrong, Block])
    model.compile(backend="graphshard")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size") as raised:
            model(inputs(ctx))
        assert raised.type is RuntimeError  # eager's own, from the line that is wrong
        assert raised.traceback[-1].name == "forward"
        assert_sharded(model)


def test_an_error_of_the_users_is_eagers(pool: Pool) -> None:
    pool.run(2, is_wrong)
