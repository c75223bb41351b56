"""Lightning Fabric: one line before `fabric.setup`."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model, mesh):
    for block in model[:-1]:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


fabric = Fabric(
    devices=2,
    strategy=ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1),
)
fabric.launch()
fabric.seed_everything(0)
with fabric.init_module(empty_init=True):
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(32, 8))
model.compile(backend="graphshard")
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

losses = []
for step in range(4):
    torch.manual_seed(fabric.world_size * step + fabric.global_rank)
    loss = model(torch.randn(4, 32).to(fabric.device)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
fabric.print(losses)
