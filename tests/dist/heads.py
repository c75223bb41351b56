"""A model with two heads, and what a step takes: of it, or of another model that reads rows of 16
numbers."""

from typing import Any

import torch
import torch.nn.functional as F
from parity import STRICT, grads
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


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


def compiled(model: nn.Module, **kwargs: Any) -> nn.Module:
    model.compile(backend="graphshard", **{**STRICT, **kwargs})
    return model


def one_step(model: nn.Module, ctx: Ctx, seed: int) -> dict[str, Any]:
    loss = model(inputs(ctx, seed)).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **grads(model)}
