"""Forwards that Dynamo gives up: they run through eager FSDP2, and say why.

It refuses some by itself (`Unsupported`); of others it fails with an error of its own, which plain
`torch.compile` raises.
"""

import logging
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from patching import patched
from pool import Ctx, Pool
from test_fallback import one_step
from test_semantics import assert_same, assert_sharded, inputs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard

pytestmark = pytest.mark.dist


class Refusing(nn.Module):
    """Raises while it is traced. Dynamo cannot go on after that: it gives up the whole call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        if torch.compiler.is_compiling():
            raise ValueError("not under a compiler")
        return self.head(x)


def refused(ctx: Ctx) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Refusing().to(ctx.device)
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    oracle, model = make(), make()
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


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


def sharded(ctx: Ctx, middle: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), middle(), Block(), nn.Linear(16, 4)).to(ctx.device)
    for block in model[:3]:
        fully_shard(block, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


def goes_on(ctx: Ctx, middle: type[nn.Module]) -> list[str]:
    oracle, model = sharded(ctx, middle), sharded(ctx, middle)
    model.compile(backend="graphshard")
    with warnings.catch_warnings(record=True) as said:
        for seed in range(3):
            assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
            assert_sharded(model)
    torch._dynamo.reset()  # its limit is of all models together
    strict = sharded(ctx, middle)
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


class Loud(Block):
    """Alike but for what it does when told to."""

    def __init__(self, does: Callable[[], object] | None) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        if self.does is not None:
            self.does()
        return super().forward(x)


def of_alike(ctx: Ctx, does: Callable[[], object], which: Collection[int]) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Loud(does if place in which else None) for place in range(4))
    model = nn.Sequential(*blocks, nn.Linear(16, 4)).to(ctx.device)
    for block in model[:4]:
        fully_shard(block, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


def some_break(ctx: Ctx, which: Collection[int], how: str) -> set[str]:
    """The blocks that are not in a graph."""
    oracle, model = (of_alike(ctx, torch._dynamo.graph_break, which) for _ in range(2))
    for module in [model] if how == "whole" else model[:4]:
        module.compile(backend="graphshard", options={"promote": False})
    for seed in range(4):
        assert_same(one_step(oracle, ctx, seed), one_step(model, ctx, seed))
        assert_sharded(model)
    return set(graphshard.explain(model).reasons) - {"(root)"}


@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("which", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
def test_blocks_that_break_leave_others_of_their_class(
    pool: Pool, which: set[int], how: str
) -> None:
    for outside in pool.run(2, some_break, which, how):
        assert outside == set(map(str, which))


LOGGER = logging.getLogger("of a model")


class Logs(Block):
    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("a block of %s", x.shape)
        return super().forward(x)


def logs(ctx: Ctx, level: int) -> tuple[int, int]:
    """How many groups are in a graph, and how many lines there are."""
    oracle, model = (sharded(ctx, Logs) for _ in range(2))
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


def is_wrong(ctx: Ctx) -> None:
    model = sharded(ctx, Wrong)
    model.compile(backend="graphshard")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size") as raised:
            model(inputs(ctx))
        assert raised.type is RuntimeError  # eager's own, from the line that is wrong
        assert raised.traceback[-1].name == "forward"
        assert_sharded(model)


def test_an_error_of_the_users_is_eagers(pool: Pool) -> None:
    pool.run(2, is_wrong)
