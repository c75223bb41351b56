"""A user's script: trains a small sharded, compiled model, and says after each step how it went.

`torchrun ... job.py 1000` takes 1,000 steps. It says "compiling" before the first.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

LIMIT_S = 10.0  # of each collective


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.compile(backend="graphshard", options={"compute": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("compiling", flush=True)
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} of {dist.get_world_size()}: {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
