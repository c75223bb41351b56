"""What autograd, hooks and state see has to be what eager FSDP2 shows, case by case."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, shard_blocks
from parity import assert_equal, build, difference, local, train, twin
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard

pytestmark = pytest.mark.dist

STRICT: dict[str, Any] = {"fullgraph": True, "options": {"fallback": "error"}}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 37), nn.Linear(37, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoHeads(nn.Module):
    """A trunk and two heads, each its own group; returns both outputs."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(dim) for _ in range(2))
        self.first, self.second = nn.Linear(dim, 7), nn.Linear(dim, 5)
        self.breaks = False
        self.fails: str | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.trunk:
            x = block(x)
        return self.first(x), self.second(x)


def two_heads(ctx: Ctx, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = TwoHeads().to(ctx.device)
    for module in (*model.trunk, model.first, model.second):
        fully_shard(module, mesh=ctx.mesh, **kwargs)
    return fully_shard(model, mesh=ctx.mesh, **kwargs)


def inputs(ctx: Ctx, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + ctx.rank)
    return torch.randn(4, 16, generator=generator).to(ctx.device)


def total(output: Tensor) -> Tensor:
    """The sum. Its gradient is one number for all; AOTAutograd writes it out, and a GPU multiplies
    that with another kernel than eager, whose last bits differ."""
    return output.sum() if output.device.type == "cpu" else (output * 1.0).sum()


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: local(p.grad) for name, p in model.named_parameters()}


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        problem = difference(value, actual[name])
        assert problem is None, f"{name}: {problem}"


def assert_sharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is a {type(param).__name__}"


def compiled(model: nn.Module, **kwargs: Any) -> nn.Module:
    model.compile(backend="graphshard", **{**STRICT, **kwargs})
    return model


Step = Callable[[Ctx, nn.Module], dict[str, Any]]


def both(ctx: Ctx, steps: tuple[Step, ...], **kwargs: Any) -> None:
    """Each of `steps` on eager FSDP2 and on graphshard; what it returns has to be bitwise equal.

    graphshard's model is compiled once; each step starts with the weights of a new one.
    """
    model = compiled(two_heads(ctx, **kwargs))
    for step in steps:
        oracle = two_heads(ctx, **kwargs)
        model.load_state_dict(oracle.state_dict())
        model.zero_grad()
        assert_same(step(ctx, oracle), step(ctx, model))
        assert_sharded(model)
    variants = len(graphshard.plans(model))
    most = max(MOST_VARIANTS.get(step.__name__, 1) for step in steps)
    assert 0 < variants <= most, variants


def unused_output(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(3):
        first, second = model(inputs(ctx, step))
        loss = first.square().mean() if step != 1 else second.square().mean()
        loss.backward()
        seen |= {f"{step} {k}": v for k, v in grads(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    assert seen["0 second.weight"] is None
    assert seen["1 first.weight"] is None
    return seen


def input_gradient_only(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    x = inputs(ctx).requires_grad_()
    first, second = model(x)
    (dx,) = torch.autograd.grad(total(first) + total(second), x)
    seen = grads(model)
    assert all(g is None for g in seen.values())
    return {"dx": dx, **seen}


def input_gradient_too(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    x = inputs(ctx).requires_grad_()
    first, second = model(x)
    (total(first) + total(second)).backward()
    return {"dx": x.grad, **grads(model)}


def retained_graph(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    first, second = model(inputs(ctx))
    loss = first.square().mean() + total(second)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def two_forwards_one_backward(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    a, b = model(inputs(ctx, 1)), model(inputs(ctx, 2))
    (total(a[0]) * total(b[0]) + total(a[1]) + total(b[1])).backward()
    return grads(model)


def two_forwards_two_backwards(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    a, b = model(inputs(ctx, 1)), model(inputs(ctx, 2))
    (a[0].square().mean() + total(a[1])).backward()
    (b[0].square().mean() + total(b[1])).backward()
    return grads(model)


def forward_without_backward(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(2):
        first, second = model(inputs(ctx, step))
        (first.square().mean() + second.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen[f"loss {step}"] = first.detach().clone()
        model(inputs(ctx, 7))  # its outputs are dropped
        model.reshard()  # or eager FSDP2 would keep the root's old values
    return seen


def optimizer_in_backward(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    calls: list[str] = []
    for name, param in model.named_parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def hook(p: nn.Parameter, optimizer: Any = optimizer, name: str = name) -> None:
            calls.append(name)
            optimizer.step()
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        first, second = model(inputs(ctx, step))
        (first.square().mean() + second.square().mean()).backward()
    assert sorted(calls) == sorted(3 * [n for n, _ in model.named_parameters()])
    assert all(g is None for g in grads(model).values())
    return {name: local(p) for name, p in model.named_parameters()}


def no_grad_between(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        first, second = model(inputs(ctx, step))
        (first.square().mean() + second.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen[f"eval {step}"] = model(inputs(ctx, 9))[0]
        with torch.inference_mode():
            seen[f"inference {step}"] = model(inputs(ctx, 9))[1].clone()
        model.reshard()
        model.train()
    return seen


def flipped_requires_grad(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for step, frozen in enumerate((False, True, False, True)):
        model.trunk.requires_grad_(not frozen)
        first, second = model(inputs(ctx, step))
        (first.square().mean() + second.square().mean()).backward()
        seen |= {f"{step} {k}": v for k, v in grads(model).items()}
        model.zero_grad()
    assert seen["1 trunk.0.up.weight"] is None
    assert seen["2 trunk.0.up.weight"] is not None
    return seen


def changing_lengths(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for step, rows in enumerate((3, 5, 4 + ctx.rank, 9, 6)):
        first, second = model(inputs(ctx, step).repeat(3, 1)[:rows])
        (first.square().mean() + second.square().mean()).backward()
        seen[f"loss {step}"] = first.detach()
    return {**seen, **grads(model)}


class Described(Tensor):
    """As libraries for images have them: a tensor that knows more, with a dispatch of torch's."""


def described_input(ctx: Ctx, model: nn.Module) -> dict[str, Any]:
    for step in range(2):
        outputs = model(inputs(ctx, step).as_subclass(Described))
        loss = sum(out.square().mean() for out in outputs)
        loss.backward()
        assert {type(out) for out in outputs} == {Described}
    return grads(model)


# What one model goes through, one after another. Hooks and flags of parameters stay where they
# were set, so these come alone.
STEPS = {
    "plain": (
        unused_output,
        retained_graph,
        two_forwards_one_backward,
        two_forwards_two_backwards,
        forward_without_backward,
        input_gradient_only,
        input_gradient_too,
    ),
    "optimizer in backward": (optimizer_in_backward,),
    "no grad between": (no_grad_between,),
    "flipped requires_grad": (flipped_requires_grad,),
    "changing lengths": (changing_lengths,),
    "described input": (described_input,),
}


# Graph variants where one is not enough: of an input with a gradient, no_grad and inference, frozen
# or not, a symbolic length.
MOST_VARIANTS = {
    "input_gradient_only": 2,
    "no_grad_between": 3,
    "flipped_requires_grad": 2,
    "changing_lengths": 2,
}


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
