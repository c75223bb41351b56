"""The smallest llama of bench/, sharded by layer, and steps of it with AdamW."""

from dataclasses import replace
from typing import Any

import torch
from pool import Ctx
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from bench.models import CONFIGS, Llama, WithLoss, make_batch

CONFIG = CONFIGS["XS"]


def sharded(ctx: Ctx, num_layers: int = CONFIG.num_layers, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = WithLoss(Llama(replace(CONFIG, num_layers=num_layers)))
    for layer in model.model.layers:
        fully_shard(layer, mesh=ctx.mesh, **settings)
    return fully_shard(model, mesh=ctx.mesh)


def steps_of(model: Any, ctx: Ctx, count: int) -> tuple[list[Tensor], list[Tensor], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(count):
        loss = model(*make_batch(CONFIG, 10 * step + ctx.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.to_local().clone() for p in model.parameters()], optimizer
