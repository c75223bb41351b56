"""Blocks compiled in place, and never the root: the whole model is one plan all the same."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Batch
from parity import Trace, assert_equal, build, train
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn

import graphshard
from graphshard.capture.fallback import promote
from graphshard.errors import GraphshardWarning

pytestmark = pytest.mark.dist

CASE = CASES["llama"]
Loss = Callable[[Batch], Tensor]


def in_place(block: nn.Module, **options: Any) -> None:
    """As torchtitan and accelerate do."""
    block.compile(backend="graphshard", fullgraph=True, options={"fallback": "error", **options})


def of_blocks(ctx: Ctx, **options: Any) -> Any:
    """Sharded, then each block compiled."""
    model: Any = build(CASE, ctx)
    for block in model.blocks:
        in_place(block, **options)
    return model


def of_blocks_first(ctx: Ctx) -> Any:
    """Each block compiled, then sharded."""
    torch.manual_seed(0)
    model: Any = CASE.build().to(ctx.device)
    for block in model.blocks:
        in_place(block)
    return CASE.shard(model, ctx.mesh)


def eager(ctx: Ctx, steps: int = 3) -> Trace:
    return train(build(CASE, ctx), CASE, ctx, steps)


def in_plans(model: nn.Module) -> tuple[int, int, int]:
    """Groups in graphs, all groups, plans. Nothing is left to wait for a root."""
    assert not promote._WAITING
    report = graphshard.explain(model)
    return report.captured, report.present, len(graphshard.plans(model))


# -- one plan --------------------------------------------------------------------------------------


def one_plan(ctx: Ctx, make: Callable[[Ctx], Any]) -> None:
    model = make(ctx)
    keys = list(model.state_dict())
    said: list[Any] = []
    with patched(promote.logger, "info", lambda _: lambda *args: said.append(args)):
        assert_equal(eager(ctx), train(model, CASE, ctx, 3))
    assert list(model.state_dict()) == keys
    captured, present, plans = in_plans(model)
    assert (captured, plans) == (present, 1)
    told = [("FSDPLlama", 4, "FSDPLlamaBlock")]
    assert [args[1:] for args in said] == (told if ctx.rank == 0 else [])


@pytest.mark.parametrize("make", [of_blocks, of_blocks_first])
def test_all_groups_are_in_one_plan(pool: Pool, make: Callable[[Ctx], Any]) -> None:
    pool.run(2, one_plan, make)


def some_blocks(ctx: Ctx) -> None:
    model: Any = build(CASE, ctx)
    for block in model.blocks[1:3]:
        in_place(block)
    assert_equal(eager(ctx), train(model, CASE, ctx, 3))
    captured, present, plans = in_plans(model)
    assert (captured, plans) == (present, 1)


def test_some_of_the_blocks_are_enough(pool: Pool) -> None:
    pool.run(2, some_blocks)


def later(ctx: Ctx) -> None:
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    assert_equal(train(oracle, CASE, ctx, 1), train(model, CASE, ctx, 1))
    for block in model.blocks:  # type: ignore[union-attr]
        in_place(block)
    told = {"first_step": 1}
    assert_equal(train(oracle, CASE, ctx, 2, **told), train(model, CASE, ctx, 2, **told))
    captured, present, plans = in_plans(model)
    assert (captured, plans) == (present, 1)


def test_compiled_after_eager_steps(pool: Pool) -> None:
    pool.run(2, later)


# -- a module around the root ----------------------------------------------------------------------


class Trainee(nn.Module):
    """As in Lightning: its steps are called, and it never is."""

    def __init__(self, *roots: nn.Module) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)

    def training_step(self, batch: Batch) -> Tensor:
        losses = [CASE.loss(root, batch) for root in self.roots]
        return torch.stack(losses).sum()


def stepped(ctx: Ctx, trainee: Trainee) -> list[Tensor]:
    """Losses and parameters of three steps."""
    optim = torch.optim.SGD(trainee.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        loss = trainee.training_step(CASE.batch(step, ctx.rank, ctx.device))
        loss.backward()
        optim.step()
        optim.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(p.to_local().clone() for p in trainee.parameters())]


def around(ctx: Ctx, count: int) -> None:
    """Beside it, another model trains that nobody compiled."""
    trainee = Trainee(*(build(CASE, ctx, seed=i) for i in range(count)))
    other = build(CASE, ctx)
    in_place(trainee)
    assert_equal(eager(ctx, 1), train(other, CASE, ctx, 1))
    found = stepped(ctx, trainee)
    oracle = Trainee(*(build(CASE, ctx, seed=i) for i in range(count)))
    assert all(map(torch.equal, stepped(ctx, oracle), found))
    for root in trainee.roots:
        report = graphshard.explain(root)
        assert (report.captured, len(graphshard.plans(root))) == (report.present, 1)
    assert not graphshard.plans(other)


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_around_the_root_was_compiled(pool: Pool, count: int) -> None:
    pool.run(2, around, count)


def called_later(ctx: Ctx) -> None:
    """Of a module around it the root is called first, and then that itself."""
    seen: list[list[Tensor]] = []
    for compiles in (False, True):
        root = build(CASE, ctx)
        whole = nn.Sequential(root, nn.ReLU())
        if compiles:
            in_place(whole)
        tokens, _ = batch = CASE.batch(0, ctx.rank, ctx.device)
        CASE.loss(root, batch).backward()
        whole(tokens).square().sum().backward()
        CASE.loss(root, batch).backward()
        seen.append([p.grad.to_local().clone() for p in root.parameters()])
    assert all(map(torch.equal, *seen))
    assert graphshard.explain(root).captured == graphshard.explain(root).present


def test_the_root_is_called_before_the_module_around_it(pool: Pool) -> None:
    pool.run(2, called_later)


# -- apart -----------------------------------------------------------------------------------------


def kept_apart(ctx: Ctx) -> None:
    model = of_blocks(ctx, promote=False)
    assert_equal(eager(ctx), train(model, CASE, ctx, 3))
    captured, present, _ = in_plans(model)
    assert captured == present - 1
    assert model._compiled_call_impl is None


def test_the_option_keeps_them_apart(pool: Pool) -> None:
    pool.run(2, kept_apart)


def unlike(ctx: Ctx) -> None:
    model: Any = build(CASE, ctx)
    for index, block in enumerate(model.blocks):
        in_place(block, micro_steps=1 + index % 2)
    assert_equal(eager(ctx), train(model, CASE, ctx, 3))
    captured, present, _ = in_plans(model)
    assert captured == present - 1


def test_blocks_with_unlike_options_stay_apart(pool: Pool) -> None:
    pool.run(2, unlike)


def alone(ctx: Ctx) -> None:
    """FSDP2 takes for a root what is called first."""
    torch.manual_seed(0)
    blocks = [graphshard.fully_shard(nn.Linear(8, 8), mesh=ctx.mesh) for _ in range(3)]
    for block in blocks:
        in_place(block)
    for block in blocks:
        block(torch.ones(2, 8, device=ctx.device)).sum().backward()
    assert [in_plans(block) for block in blocks] == [(1, 1, 1)] * 3


def test_blocks_that_are_called_alone_are_compiled_themselves(pool: Pool) -> None:
    pool.run(2, alone)


# -- beside other ways to compile ------------------------------------------------------------------


def root_too(ctx: Ctx, how: str) -> None:
    model = of_blocks(ctx)
    loss: Loss = partial(CASE.loss, model)
    if how == "in place":
        in_place(model)
    elif how == "wrapped":
        loss = partial(CASE.loss, torch.compile(model, backend="graphshard", fullgraph=True))
    else:
        loss = torch.compile(loss, backend="graphshard", fullgraph=True)
    assert_equal(eager(ctx), train(model, CASE, ctx, 3, run=loss))
    report = graphshard.explain(model)
    assert (report.captured, len(graphshard.plans(model))) == (report.present, 1)


@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_a_root_that_is_compiled_too(pool: Pool, how: str) -> None:
    pool.run(2, root_too, how)


def beside_its_wrapper(ctx: Ctx) -> list[str]:
    """What is said while a model is called that somebody has wrapped and forgotten."""
    model = build(CASE, ctx)
    wrapper = torch.compile(model, backend="graphshard")
    batch, said = CASE.batch(0, ctx.rank, ctx.device), []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            CASE.loss(model, batch).backward()
        said.append([str(one.message) for one in found if one.category is GraphshardWarning])
    CASE.loss(wrapper, batch).backward()
    assert in_plans(model)[0] == 5
    assert [len(texts) for texts in said] == [0, 1, 0]
    return said[1]


def test_a_wrapper_that_nobody_calls_is_said_once(pool: Pool) -> None:
    for (text,) in pool.run(2, beside_its_wrapper):
        assert "torch.compile wrapped FSDPLlama" in text


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def beside(ctx: Ctx) -> None:
    """One model trains, compiled whole, while the blocks of another wait, and after that."""
    oracle, model, other = build(CASE, ctx), build(CASE, ctx), build(CASE, ctx)
    in_place(model)

    def train_on(step: int) -> None:
        told = {"first_step": step}
        assert_equal(train(oracle, CASE, ctx, 2, **told), train(model, CASE, ctx, 2, **told))

    train_on(0)
    waiting = of_blocks(ctx)
    before = compilations()
    train_on(2)
    assert_equal(eager(ctx, 2), train(other, CASE, ctx, 2))
    assert compilations() == before
    assert not graphshard.plans(other)
    assert_equal(eager(ctx, 2), train(waiting, CASE, ctx, 2))
    assert len(graphshard.plans(waiting)) == 1
    before = compilations()
    train_on(4)
    assert compilations() == before


def test_other_models_do_not_notice(pool: Pool) -> None:
    pool.run(2, beside)


# -- what breaks the graph around them -------------------------------------------------------------


class Breaks(nn.Module):
    """Where: "before" the blocks, "between" two of them in a loop, or nowhere."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "before":
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = block(x)
            if self.where == "between" and x.sum().item() > 1e9:
                break
        return x


def broken(ctx: Ctx, where: str) -> tuple[int, int]:
    seen: list[list[Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = Breaks(where).to(ctx.device)
        for block in model.blocks:
            if compiles:
                in_place(block)
            graphshard.fully_shard(block, mesh=ctx.mesh)
        graphshard.fully_shard(model, mesh=ctx.mesh)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        seen.append([])
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(2, 8, device=ctx.device)).square().sum().backward()
            optim.step()
            optim.zero_grad()
        seen[-1] += [p.to_local().clone() for p in model.parameters()]
    assert all(map(torch.equal, *seen))
    return in_plans(model)[:2]


@pytest.mark.filterwarnings("ignore:graphshard. group")
@pytest.mark.parametrize("where", ["before", "between"])
def test_the_graph_around_them_breaks(pool: Pool, where: str) -> None:
    for captured, present in pool.run(2, broken, where):
        assert captured >= present - 1
