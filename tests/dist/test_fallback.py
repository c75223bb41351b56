"""Exceptions, parts that stay eager, and what graphshard must not change for anybody else."""

import logging
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from between_steps import assert_clean, assert_sharded
from heads import TwoHeads, inputs, one_step, two_heads
from models import CASES, Llama
from parity import STRICT, assert_equal, assert_same, build, grads, train, twin
from pool import Ctx, Pool, capped
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.capture import fallback
from graphshard.capture.root_state import root_states_under
from graphshard.compiler import planning
from graphshard.runtime import buckets

pytestmark = pytest.mark.dist


class Boom(Exception):
    pass


def step(model: nn.Module, ctx: Ctx, seed: int = 0) -> dict[str, Any]:
    first, second = model(inputs(ctx, seed))
    (first.square().mean() + second.square().mean()).backward()
    seen = {"loss": first.detach().clone(), **grads(model)}
    model.zero_grad()
    return seen


class Failing(nn.Module):
    """Raises in the middle of the forward when told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fails:
            raise Boom("forward")
        return x


def failing_heads(ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = TwoHeads().to(ctx.device)
    model.trunk[1] = Failing(model.trunk[1]).to(ctx.device)
    for module in (*model.trunk, model.first, model.second):
        fully_shard(module, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


def forward_exception(ctx: Ctx, how: str) -> None:
    oracle, model = failing_heads(ctx), failing_heads(ctx)
    run: Any = model
    if how == "in place":
        model.compile(backend="graphshard")
    elif how == "wrapped":
        run = torch.compile(model, backend="graphshard")
    else:
        run = torch.compile(lambda x: model(x), backend="graphshard")
    call = _call_with(model, run)
    assert_same(step(oracle, ctx), step(call, ctx))
    model.trunk[1].fails = True
    with pytest.raises(Boom):
        run(inputs(ctx))
    assert_clean(model)
    model.trunk[1].fails = False
    assert_same(step(oracle, ctx, 1), step(call, ctx, 1))
    assert_clean(model)


def _call_with(model: nn.Module, run: Any) -> Any:
    class Proxy:
        named_parameters = staticmethod(model.named_parameters)
        zero_grad = staticmethod(model.zero_grad)

        def __call__(self, x: Tensor) -> Any:
            return run(x)

    return Proxy()


@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_exception_in_forward(pool: Pool, how: str) -> None:
    pool.run(2, forward_exception, how)


def forward_exceptions(ctx: Ctx, how: str, fails_at: list[int]) -> None:
    """Exceptions that every rank catches, also while Dynamo traces the first call."""
    oracle, model = failing_heads(ctx), failing_heads(ctx)
    run: Any = model
    if how == "in place":
        model.compile(backend="graphshard", options={"fallback": "error"})
    elif how == "wrapped":
        run = torch.compile(model, backend="graphshard", options={"fallback": "error"})
    else:
        run = torch.compile(lambda x: model(x), backend="graphshard", options={"fallback": "error"})
    call, forwards = _call_with(model, run), 0
    for index in range(4):
        model.trunk[1].fails = index in fails_at
        if model.trunk[1].fails:
            with pytest.raises(Boom):
                run(inputs(ctx))
        else:
            assert_same(step(oracle, ctx, index), step(call, ctx, index))
            forwards += 1
        assert_clean(model)
        (record,) = root_states_under(model)
        assert {live.counters.forwards for live in record.groups} == {forwards}  # in the graph
        assert record.reasons == record.outside == {}


@pytest.mark.parametrize("fails_at", [[0, 2], [1, 2]])
@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_a_model_goes_on_compiled_after_an_exception(
    pool: Pool, how: str, fails_at: list[int]
) -> None:
    pool.run(2, forward_exceptions, how, fails_at)


def backward_exception(ctx: Ctx, where: str) -> None:
    oracle, model = two_heads(ctx), two_heads(ctx)
    model.compile(backend="graphshard", **STRICT)
    assert_same(step(oracle, ctx), step(model, ctx))
    first, second = model(inputs(ctx))

    def boom(grad: Tensor) -> Tensor:
        raise Boom("backward")

    handle = None
    if where == "before the graph":
        first.register_hook(boom)
    else:
        handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(boom)
    with pytest.raises(Boom):
        (first.sum() + second.sum()).backward()
    if handle is not None:
        handle.remove()
    model.zero_grad()
    del first, second
    assert_sharded(model)
    assert_same(step(oracle, ctx, 1), step(model, ctx, 1))
    assert_clean(model)


@pytest.mark.parametrize("where", ["before the graph", "in a parameter's hook"])
def test_exception_in_backward(pool: Pool, where: str) -> None:
    pool.run(2, backward_exception, where)


def collective_failure(ctx: Ctx) -> None:
    oracle, model = two_heads(ctx), two_heads(ctx)
    model.compile(backend="graphshard", options={"fallback": "error", "schedule": "fsdp2"})
    assert_same(step(oracle, ctx), step(model, ctx))
    original, calls = buckets._copy_out, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Boom("collective")
        return original(*args)

    buckets._copy_out = failing
    try:
        with pytest.raises(Boom):
            model(inputs(ctx))
    finally:
        buckets._copy_out = original
    assert_clean(model)
    assert_same(step(oracle, ctx, 1), step(model, ctx, 1))


def test_failure_at_a_collective(pool: Pool) -> None:
    if capped(2) == 1:
        pytest.skip("one rank has no collectives")
    pool.run(2, collective_failure)


def broken_pass(ctx: Ctx, name: str) -> list[str]:
    def boom(program: Any) -> Any:
        raise Boom(name)

    oracle, model = two_heads(ctx), two_heads(ctx)
    model.compile(backend="graphshard")
    original = getattr(planning, name)
    setattr(planning, name, (boom,))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fallback.warn_once.cache_clear()
            assert_same(step(oracle, ctx), step(model, ctx))
    finally:
        setattr(planning, name, original)
    assert_clean(model)
    assert_same(step(oracle, ctx, 1), step(model, ctx, 1))
    assert graphshard.plans(model) == []
    report = graphshard.explain(model)
    assert report.reasons
    assert all("Boom" in reason for reason in report.reasons.values())
    return [str(w.message) for w in caught if issubclass(w.category, graphshard.GraphshardWarning)]


@pytest.mark.parametrize("name", ["CAPTURED", "PLACEMENT"])
def test_failure_in_a_pass_falls_back_to_fsdp2(pool: Pool, name: str) -> None:
    for messages in pool.run(2, broken_pass, name):
        assert len(messages) == 1
        assert "Boom" in messages[0]
        assert "fallback" in messages[0]


def strict_failure(ctx: Ctx) -> None:
    def boom(program: Any) -> Any:
        raise Boom("pass")

    oracle, model = two_heads(ctx), two_heads(ctx)
    model.compile(backend="graphshard", options={"fallback": "error"})
    original = planning.PLACEMENT
    planning.PLACEMENT = (boom,)
    try:
        with pytest.raises(Exception, match="Boom"):
            model(inputs(ctx))
    finally:
        planning.PLACEMENT = original
    assert_clean(model)
    torch._dynamo.reset()
    assert_same(step(oracle, ctx), step(model, ctx))
    assert graphshard.plans(model)


def test_fallback_error_raises(pool: Pool) -> None:
    pool.run(2, strict_failure)


class Watchful(nn.Linear):
    """Something that graphshard leaves to FSDP2."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def watchful_block(ctx: Ctx) -> list[str]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Llama()
        gate = model.blocks[1].gate
        model.blocks[1].gate = Watchful(gate.in_features, gate.out_features, bias=False)
        model.to(ctx.device)
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    case = CASES["llama"]
    oracle, model = make(), make()
    expected = train(oracle, case, ctx, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(backend="graphshard")
        assert_equal(expected, train(model, case, ctx, 3))
    report = graphshard.explain(model)
    assert "overrides __setattr__" in report.reasons["blocks.1"]
    assert "models.py" in report.reasons["(root)"]
    assert len(report.reasons) == 2
    assert report.captured == report.present - 2
    assert_sharded(model)
    return [str(w.message) for w in caught if issubclass(w.category, graphshard.GraphshardWarning)]


def watchful_error(ctx: Ctx) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Watchful(8, 8)).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    model.compile(backend="graphshard", options={"fallback": "error"})
    with pytest.raises(graphshard.UnsupportedModel, match=r"group 1 .* overrides __setattr__"):
        model(torch.zeros(2, 8, device=ctx.device))
    assert_clean(model)


def test_unsupported_group_is_an_error_if_asked(pool: Pool) -> None:
    pool.run(2, watchful_error)


def test_bad_options_fail_at_once() -> None:
    with pytest.raises(ValueError, match="did you mean 'fallback'"):
        torch.compile(nn.Linear(2, 2), backend="graphshard", options={"fallbck": "error"})


def test_unsupported_group_runs_eagerly_between_graphs(pool: Pool) -> None:
    for messages in pool.run(2, watchful_block):
        assert len([m for m in messages if "blocks.1" in m]) == 1


class Breaking(nn.Module):
    """A graph break in the middle of a block, with parameters on both sides of it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x) + self.a(x)


def graph_break(ctx: Ctx, how: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Breaking(), nn.Linear(16, 7), Breaking(7)).to(ctx.device)
        for block in model:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    oracle, model = make(), make()
    run: Any = model
    if how == "in place":
        model.compile(backend="graphshard")
    else:
        run = torch.compile(lambda x: model(x), backend="graphshard")
    call = _call_with(model, run)
    for seed in range(4):
        assert_same(one_step(oracle, ctx, seed), one_step(call, ctx, seed))
        assert_sharded(model)
    report = graphshard.explain(model)
    assert report.captured == 1
    assert sorted(report.reasons) == ["0", "2"]
    assert all("test_fallback.py" in why for why in report.reasons.values())


@pytest.mark.parametrize("how", ["in place", "function"])
def test_graph_break_inside_a_block(pool: Pool, how: str) -> None:
    pool.run(2, graph_break, how)


def nested(ctx: Ctx) -> None:
    oracle, model = two_heads(ctx), two_heads(ctx)
    inner = torch.compile(model, backend="graphshard", **STRICT)
    outer = torch.compile(lambda x: inner(x), backend="graphshard", **STRICT)
    assert_same(step(oracle, ctx), step(_call_with(model, outer), ctx))
    assert len(graphshard.plans(model)) == 1
    assert_same(step(oracle, ctx, 1), step(_call_with(model, inner), ctx, 1))


def test_compiled_model_inside_a_compiled_function(pool: Pool) -> None:
    pool.run(2, nested)


def recompile_limit(ctx: Ctx) -> tuple[list[str], int]:
    fallback.warn_once.cache_clear()
    oracle, model = two_heads(ctx), two_heads(ctx)
    model.compile(backend="graphshard", dynamic=False)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(recompile_limit=3),
    ):
        warnings.simplefilter("always")
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        for rows in range(1, 7):
            expected, actual = (net(inputs(ctx).repeat(2, 1)[:rows]) for net in (oracle, model))
            assert torch.equal(expected[0], actual[0])
            for out in (expected, actual):
                (out[0].sum() + out[1].sum()).backward()
            assert_same(grads(oracle), grads(model))
    texts = [str(w.message) for w in caught if issubclass(w.category, graphshard.GraphshardWarning)]
    return texts, len(graphshard.plans(model))


def test_recompile_limit_is_said_aloud(pool: Pool) -> None:
    for texts, plans in pool.run(2, recompile_limit):
        assert any("limit" in t for t in texts)
        assert plans > 3  # then its modules run in graphs of their own


def shared_parameter(ctx: Ctx) -> None:
    if not hasattr(torch.distributed, "all_gather_single"):
        return  # torch 2.11 has no such check
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(ctx.device)
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    model.compile(backend="graphshard", fullgraph=True)
    with pytest.raises(ValueError, match="shared with a parameter already managed"):
        model(torch.randn(2, 8, device=ctx.device))


def test_fsdp2_validation_is_its_own(pool: Pool) -> None:
    pool.run(2, shared_parameter)


def sequential_root(ctx: Ctx) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 7)), mesh=ctx.mesh)

    oracle, model = make().to(ctx.device), make().to(ctx.device)
    run = torch.compile(model, backend="graphshard", **STRICT)
    for net in (oracle, run):
        net(inputs(ctx)).sum().backward()
    assert_same(grads(oracle), grads(model))
    assert graphshard.explain(model).captured == 1
    assert isinstance(next(model.parameters()), DTensor)


def test_root_that_is_a_builtin_container(pool: Pool) -> None:
    pool.run(2, sequential_root)


def disabled_worker() -> None:
    """Runs in a process of its own, with GRAPHSHARD_DISABLE=1."""
    from pool import Ctx as Context
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ctx = Context(0, 2, init_device_mesh("cpu", (2,)), torch.device("cpu"))
    model = build(CASES["llama"], ctx)
    run = torch.compile(model, backend="graphshard", fullgraph=True)
    loss = CASES["llama"].loss(run, CASES["llama"].batch(0, 0, ctx.device))
    loss.backward()
    model.compile(backend="graphshard")  # gives torch.compile a bound method
    CASES["llama"].loss(model, CASES["llama"].batch(0, 0, ctx.device)).backward()
    assert not graphshard.plans(model)
    assert "graphshard.runtime.run" not in sys.modules or not graphshard.explain(model).captured
    from torch._dynamo.utils import counters

    print("frames", counters["frames"]["total"])


def test_kill_switch() -> None:
    code = "import test_fallback; test_fallback.disabled_worker()"
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "GRAPHSHARD_DISABLE": "1",
            "PYTHONPATH": f"{here}:{here.parent}",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "frames 0"


def used_before(ctx: Ctx) -> None:
    case = CASES["llama"]
    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 2)
    actual = train(model, case, ctx, 2)
    assert_equal(expected, actual)
    expected = train(oracle, case, ctx, 2, first_step=2)
    run = torch.compile(model, backend="graphshard", **STRICT)
    assert_equal(expected, train(model, case, ctx, 2, first_step=2, run=partial(case.loss, run)))


def test_eager_steps_before_compiled_steps(pool: Pool) -> None:
    pool.run(2, used_before)
