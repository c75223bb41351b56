"""Trains a small model on one of two ranks: `python logged.py RANK PORT REPORT_DIR`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphshard


def main(rank: int, port: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    options = {"fallback": "error", "schedule": "fsdp2", "report_dir": Path(folder)}
    model.compile(backend="graphshard", options=options)
    with graphshard.profile(model):
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
