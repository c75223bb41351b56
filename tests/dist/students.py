"""Small models in training: blocks and a head, the ways to compile them, and a student, which is
compared with its eager twin at each step."""

import copy
from typing import Any

import torch
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard

WIDTH = 8


class Blocks(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Outer(nn.Module):
    """Holds the other model under a name of its own; only that one is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


def sharded(ctx: Ctx, model: nn.Module | None = None, *, pairs: bool = False) -> nn.Module:
    """Each block is a group; pairs: two blocks together (`fully_shard([a, b])`)."""
    model = Blocks() if model is None else model
    inner = model.inner if isinstance(model, Outer) else model
    if pairs:
        fully_shard(list(inner.blocks), mesh=ctx.mesh)
    else:
        for block in inner.blocks:
            fully_shard(block, mesh=ctx.mesh)
    if inner is not model:
        fully_shard(inner, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    return model


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="graphshard", options={"fallback": "error", **options})
    return model


def wrapped(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="graphshard", options={"fallback": "error", **options})


def steps_of(call: Any, model: nn.Module, ctx: Ctx, steps: int, *, trains: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)
    for _ in range(steps):
        x = torch.randn(4, WIDTH)
        with torch.set_grad_enabled(trains):
            out = call(x)
        if trains:
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


class Student:
    """A model in training with its eager twin; `step` compares them to the last bit."""

    def __init__(self, ctx: Ctx, seed: int, compiled: Any, base: nn.Module | None = None) -> None:
        torch.manual_seed(seed)
        self.model = sharded(ctx, base and copy.deepcopy(base))
        torch.manual_seed(seed)
        self.oracle = sharded(ctx, base and copy.deepcopy(base))
        self.call = compiled(self.model)
        self.inputs = torch.Generator().manual_seed(100 * seed + ctx.rank)

    def step(self) -> None:
        x = torch.randn(4, WIDTH, generator=self.inputs)
        losses = []
        for call in (self.call, self.oracle):
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        pairs = list(zip(gradients(self.model), gradients(self.oracle), strict=True))
        assert pairs
        assert all(torch.equal(ours, eager) for ours, eager in pairs)
        for model in (self.model, self.oracle):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


def facts(model: nn.Module) -> tuple[int, int, list[str]]:
    report = graphshard.explain(model)
    names = [g.fqn for plan in graphshard.plans(model) for g in plan.groups]
    assert all(p.fqn for plan in graphshard.plans(model) for g in plan.groups for p in g.params)
    return report.graphs, report.captured, sorted(names)
