"""Steps by which autograd, hooks and state show whether they are eager FSDP2's, and the comparison.

Each step takes a model with two heads, and returns what has to be bitwise equal.
"""

from collections.abc import Callable
from typing import Any

import torch
from between_steps import assert_sharded
from heads import compiled, inputs, total, two_heads
from parity import assert_same, grads, local
from pool import Ctx
from torch import Tensor, nn

import graphshard

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
