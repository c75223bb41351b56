"""What autograd, hooks and state see has to be what eager FSDP2 shows, case by case."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from between_steps import assert_sharded
from heads import compiled, inputs, total, two_heads
from models import CASES, shard_blocks
from parity import STRICT, assert_equal, assert_same, build, grads, train, twin
from pool import Ctx, Pool
from semantic_cases import STEPS, both, two_forwards_one_backward
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", STEPS)
def test_equals_eager(pool: Pool, name: str) -> None:
    pool.run(2, both, STEPS[name])


def mixed_precision(ctx: Ctx, policy: dict[str, Any], name: str) -> list[str]:
    case = CASES[name]
    kwargs = {"mp_policy": MixedPrecisionPolicy(**policy)}
    oracle, model = twin(case, ctx, **kwargs)
    expected = train(oracle, case, ctx, 4, micro_steps=2)
    compiled(model)
    assert_equal(expected, train(model, case, ctx, 4, micro_steps=2))
    return [p.dtype for g in graphshard.plans(model)[0].groups for p in g.params]


@pytest.mark.parametrize(
    "policy",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"reduce_dtype": torch.bfloat16},
    ],
    ids=["bf16-reduce-fp32", "reduce-bf16"],
)
def test_mixed_precision(pool: Pool, policy: dict[str, Any]) -> None:
    for dtypes in pool.run(2, mixed_precision, policy, "llama"):
        assert set(dtypes) == {str(policy.get("param_dtype", torch.float32)).split(".")[1]}


def cast_outputs(ctx: Ctx) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    both(ctx, (two_forwards_one_backward,), mp_policy=policy)


def test_output_dtype(pool: Pool) -> None:
    pool.run(2, cast_outputs)


def autocast(ctx: Ctx) -> list[str]:
    case = CASES["llama"]
    oracle, model = twin(case, ctx)

    def run(net: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            return case.loss(net, batch)

    expected = train(oracle, case, ctx, 3, run=partial(run, oracle))
    compiled(model)
    assert_equal(expected, train(model, case, ctx, 3, run=partial(run, model)))
    return [f"{p.fqn} {p.dtype}" for g in graphshard.plans(model)[0].groups for p in g.params]


def test_autocast_gathers_in_the_dtype_that_compute_uses(pool: Pool) -> None:
    for rows in pool.run(2, autocast):
        linear = [r for r in rows if "blocks.0" in r and "norm" not in r]
        assert linear
        assert all(r.endswith("bfloat16") for r in linear), linear


def stale_root(ctx: Ctx) -> None:
    """Parameters that change between forward and backward are not read from old memory."""
    model = compiled(two_heads(ctx, reshard_after_forward=False))
    first, _ = model(inputs(ctx))
    assert graphshard.explain(model).captured == 4
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    again, _ = model(inputs(ctx))
    assert not torch.equal(first, again)
    assert again.abs().max() == 0


def test_kept_groups_are_dropped_when_a_parameter_changes(pool: Pool) -> None:
    pool.run(2, stale_root)


def eager_after_compiled(ctx: Ctx) -> None:
    case = CASES["llama"]
    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 1)
    run = torch.compile(model, backend="graphshard", **STRICT)
    actual = train(model, case, ctx, 1, run=partial(case.loss, run))
    assert_equal(expected, actual)
    assert_sharded(model)
    hidden = [block_call(net, ctx) for net in (oracle, model)]
    assert torch.equal(*hidden)
    expected = train(oracle, case, ctx, 2, first_step=1)
    assert_equal(expected, train(model, case, ctx, 2, first_step=1))
    expected = train(oracle, case, ctx, 2, first_step=3)
    actual = train(model, case, ctx, 2, first_step=3, run=partial(case.loss, run))
    assert_equal(expected, actual)


def block_call(net: nn.Module, ctx: Ctx) -> Tensor:
    """One block alone, in eager mode."""
    block = net.blocks[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, block.norm1.weight.shape[0], generator=generator).to(ctx.device)
    with torch.no_grad():
        return block(x, net.cos[:4], net.sin[:4])


def test_eager_block_and_eager_step_after_a_compiled_step(pool: Pool) -> None:
    pool.run(2, eager_after_compiled)


class Checkpointed(nn.Module):
    """Checkpointing of a part of a block, random numbers inside."""

    def __init__(self, dim: int, nested: bool) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.3)
        self.nested = nested

    def part(self, x: Tensor) -> Tensor:
        return self.drop(F.silu(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.part, self.outer(x), use_reentrant=False)
        return checkpoint(self.part, x, use_reentrant=False) if self.nested else x


def checkpointed_parts(ctx: Ctx, nested: bool, breaks: bool) -> tuple[int, int]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Checkpointed(16, nested) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            if breaks:
                torch._dynamo.graph_break()
            return self.blocks[2](self.blocks[1](x))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return shard_blocks(("blocks",), Net().to(ctx.device), ctx.mesh)

    def run(model: nn.Module) -> dict[str, Any]:
        for step in range(3):
            torch.manual_seed(10 * step + ctx.rank)
            model(inputs(ctx, step)).square().mean().backward()
        return grads(model)

    model = make()
    model.compile(backend="graphshard", fullgraph=not breaks)
    assert_same(run(make()), run(model))
    report = graphshard.explain(model)
    return report.captured, report.present


@pytest.mark.parametrize("nested", [False, True])
def test_checkpointing_inside_blocks(pool: Pool, nested: bool) -> None:
    for captured, present in pool.run(2, checkpointed_parts, nested, False):
        assert captured == present == 3


def test_checkpointing_around_a_graph_break(pool: Pool) -> None:
    pool.run(2, checkpointed_parts, False, True)


def state_dict_case(ctx: Ctx) -> None:
    model = build(CASES["llama"], ctx)
    compiled(model)
    train(model, CASES["llama"], ctx, 1)
    assert "_orig_mod" not in "".join(model.state_dict())
    assert all(isinstance(v, DTensor) for v in model.state_dict().values())


def test_state_dict_keys_and_kinds_stay(pool: Pool) -> None:
    pool.run(2, state_dict_case)


class Limited(nn.Module):
    """Reads buffers of one number each, of which an integer can hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("most", torch.tensor(float("inf")))
        self.register_buffer("scale", torch.tensor(float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.where(self.scale.isnan(), 2.0, self.scale)
        return torch.minimum(self.linear(x) * scale, self.most).square()


def numbers_without_an_integer(ctx: Ctx) -> None:
    seen = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Limited().to(ctx.device), mesh=ctx.mesh)
        if compiles:
            model.compile(backend="graphshard", **STRICT)
        loss = total(model(inputs(ctx)))
        loss.backward()
        seen.append({"loss": loss.detach(), **grads(model)})
    assert_same(*seen)


def test_a_buffer_may_be_a_number_that_is_no_integer(pool: Pool) -> None:
    pool.run(2, numbers_without_an_integer)
