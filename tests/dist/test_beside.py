"""A parameter that is read beside its group: eager FSDP2 has it gathered there, or not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import UnsupportedModel

pytestmark = pytest.mark.dist


class FusedHead(nn.Module):
    """Takes the head's weight, and calls the norm alone, as chunked losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x))
        weight = self.head.weight
        return F.linear(hidden, weight.full_tensor() if isinstance(weight, DTensor) else weight)


def sharded(ctx: Ctx, *, together: bool) -> Any:
    torch.manual_seed(0)
    model: Any = FusedHead().to(ctx.device)
    graphshard.fully_shard(model.inner, mesh=ctx.mesh)
    for group in [[model.norm, model.head]] if together else [model.norm, model.head]:
        graphshard.fully_shard(group, mesh=ctx.mesh)
    return graphshard.fully_shard(model, mesh=ctx.mesh)


def gradients(model: nn.Module, ctx: Ctx) -> list[Tensor]:
    """Of rank's own batches."""
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(3):
        model(torch.randn(2, 8, generator=generator).to(ctx.device)).square().sum().backward()
    return [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]


def read_beside(ctx: Ctx, together: bool) -> dict[str, str]:
    oracle, model = sharded(ctx, together=together), sharded(ctx, together=together)
    model.compile(backend="graphshard")
    assert all(map(torch.equal, gradients(oracle, ctx), gradients(model, ctx)))
    return graphshard.explain(model).reasons


@pytest.mark.parametrize("together", [True, False])
def test_gradients_are_those_of_eager(pool: Pool, together: bool) -> None:
    for reasons in pool.run(2, read_beside, together):
        named = [fqn for fqn, why in reasons.items() if "head.weight is read beside" in why]
        assert len(named) == together


def refused(ctx: Ctx) -> None:
    model = sharded(ctx, together=True)
    model.compile(backend="graphshard", options={"fallback": "error"})
    with pytest.raises(UnsupportedModel, match=r"GS210: head\.weight is read beside"):
        gradients(model, ctx)


def test_an_error_where_asked_for(pool: Pool) -> None:
    pool.run(2, refused)
