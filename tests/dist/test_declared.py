"""Differences from eager FSDP2 that docs/reference/differences.md declares: both sides of them, so
that the list stays true. Those of states stand in test_contract.py and test_fuzz_found.py.
"""

import pytest
import torch
from pool import Ctx, Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.dist


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.used = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return self.used(x), self.unused(x)


def compiled(model: nn.Module) -> None:
    model.compile(backend="graphshard", options={"compute": "aten", "fallback": "error"})


def gradient_of_unused(ctx: Ctx, by_graphshard: bool) -> float | None:
    """Sum of the gradient of a head that is in no group and not in the loss."""
    model = TwoHeads().to(ctx.device)
    fully_shard(model.body, mesh=ctx.mesh)
    if by_graphshard:
        compiled(model)
    model(torch.ones(2, 8, device=ctx.device))[0].sum().backward()
    grad = model.unused.weight.grad
    return None if grad is None else grad.abs().sum().item()


def test_an_unused_output_gives_zeros_outside_of_groups(pool: Pool) -> None:
    assert set(pool.run(2, gradient_of_unused, False)) == {None}
    assert set(pool.run(2, gradient_of_unused, True)) == {0.0}


def trains_when_frozen_while_gathered(ctx: Ctx, by_graphshard: bool) -> tuple[bool, bool]:
    """Whether the layer gets a gradient then, and after its shards were frozen."""
    model = TwoHeads().to(ctx.device)
    fully_shard(model.body, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    if by_graphshard:
        compiled(model)
    found = []
    for gathers in (True, False):
        if gathers:
            model.body.unshard()
        model.body.requires_grad_(False)
        sum(model(torch.ones(2, 8, device=ctx.device))).sum().backward()
        found.append(model.body.weight.grad is not None)
        model.zero_grad()
    return found[0], found[1]


def test_what_is_frozen_while_gathered_is_frozen_for_eager_only(pool: Pool) -> None:
    assert set(pool.run(2, trains_when_frozen_while_gathered, False)) == {(False, False)}
    assert set(pool.run(2, trains_when_frozen_while_gathered, True)) == {(True, False)}


class Asking(nn.Module):
    """The answers are powers of two in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        answers = (isinstance(weight, nn.Parameter), weight.requires_grad, weight.is_leaf)
        return x.sum() * 0 + sum(2**i for i, yes in enumerate(answers) if yes) + 0 * weight.sum()


def answers(ctx: Ctx, by_graphshard: bool, tensor_parallel: bool) -> tuple[bool, ...]:
    """Whether a parameter is one, requires grad, is a leaf, within the forward of its group."""
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("fsdp", "tp"))
    model = Asking().to(ctx.device)
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"inner": ColwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    if by_graphshard:
        compiled(model)
    found = model(torch.ones(2, 4, device=ctx.device))
    code = int(found.full_tensor() if isinstance(found, DTensor) else found)
    return tuple(bool(code & 2**i) for i in range(3))


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_what_a_forward_may_ask_of_a_parameter(pool: Pool, tensor_parallel: bool) -> None:
    assert set(pool.run(2, answers, False, tensor_parallel)) == {(True, True, True)}
    assert set(pool.run(2, answers, True, tensor_parallel)) == {(True, True, False)}
