"""Lightning's Trainer: a callback, with options."""

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from graphshard.integrations.lightning import GraphshardCallback


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        self.model = nn.Sequential(*blocks, nn.Linear(32, 8))
        self.losses = []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.model[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch):
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
trainer = Trainer(
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[GraphshardCallback(memory_budget="fsdp2")],
)
module = Regression()
data = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
trainer.fit(module, DataLoader(data, batch_size=4))

model, losses = module.model, module.losses
