"""Ray Train: the loop of each worker shards and compiles, saves, and reports what runs."""

import tempfile

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import graphshard


def loop():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(32, 8)).to(ray.train.torch.get_device())
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    model.compile(backend="graphshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = ray.train.get_context()
    losses = []
    for step in range(4):
        torch.manual_seed(context.get_world_size() * step + context.get_world_rank())
        loss = model(torch.randn(4, 32).to(ray.train.torch.get_device())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"losses": losses, **graphshard.metrics(model)}, checkpoint=saved)


trainer = TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
    run_config=RunConfig(storage_path=tempfile.mkdtemp()),
)
metrics = trainer.fit().metrics
print(metrics)
