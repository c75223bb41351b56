"""Methods of `register_fsdp_forward_method` that the compiled root's forward calls."""

from typing import Any

import pytest
import torch
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import graphshard

pytestmark = pytest.mark.dist


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def encode(self, x: Tensor, *, scale: float) -> Tensor:
        return self.b(torch.relu(self.a(x))) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList(Coder() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for coder in self.coders:
            x = x + coder.encode(x, scale=0.5)
        return self.head(self.coders[0](x))


def trained(ctx: Ctx) -> None:
    seen: list[Any] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model().to(ctx.device)
        for coder in model.coders:
            fully_shard(coder, mesh=ctx.mesh)
            register_fsdp_forward_method(coder, "encode")
        fully_shard(model, mesh=ctx.mesh)
        if compiled:
            model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(2, 8, device=ctx.device)).square().mean().backward()
        seen.append([p.grad.to_local().clone() for p in model.parameters()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)
    report = graphshard.explain(model)
    assert (report.captured, report.present, report.reasons) == (3, 3, {})


def test_are_in_its_graph(pool: Pool) -> None:
    pool.run(2, trained)
