"""Ranks that come apart: a model that each rank may run otherwise, a process group of its own for
each case, and the error that all ranks get."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard


class Blocks(nn.Module):
    """Blocks in an order that each rank is told, and an op more if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.order = [0, 1, 2, 3]
        self.scale: float | None = None
        self.breaks = self.breaks_in_loop = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order[:2]:
            x = self.blocks[index](x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        for index in self.order[2:]:
            if self.breaks_in_loop:
                torch._dynamo.graph_break()
            x = self.blocks[index](x).tanh()
        return x if self.scale is None else x * self.scale


def own_mesh(ctx: Ctx) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(list(range(ctx.world_size))), ctx.device.type)


def blocks(ctx: Ctx, mesh: DeviceMesh) -> Blocks:
    torch.manual_seed(0)
    model = Blocks().to(ctx.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model: nn.Module, ctx: Ctx, seeds: range, rows: int = 3) -> list[Tensor]:
    found = []
    for seed in seeds:
        torch.manual_seed(seed * 10 + ctx.rank)
        loss = model(torch.randn(rows, 16, device=ctx.device)).square().mean()
        loss.backward()
        found.append(loss.detach().clone())
    return found


def caught(run: Any) -> tuple[str, float]:
    """The text of the DivergedRanks that `run` raises, and after how long."""
    began = time.monotonic()
    with pytest.raises(graphshard.DivergedRanks) as error:
        run()
    return str(error.value), time.monotonic() - began
