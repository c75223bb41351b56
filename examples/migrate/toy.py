"""What the scripts in this folder share: a small model, its data, and what they print.

Every script trains the same model from the same seed on the same batches, so all of them print the
same losses, as near as sums in another order can be.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTH, CLASSES = 32, 4, 10
STEPS, MICRO = 3, 2  # optimizer steps, and backward runs for each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def start() -> torch.device:
    """Join the other processes: a GPU for each, or all on the CPU."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return torch.device(device.type, torch.accelerator.current_device_index())


def loss_of(model: nn.Module, number: int, device: torch.device) -> Tensor:
    """The loss of batch `number` of this rank, for one of MICRO micro-steps."""
    seed = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    inputs = torch.randn(16, WIDTH, generator=seed).to(device)
    targets = inputs[:, :CLASSES].argmax(1)
    return F.cross_entropy(model(inputs), targets) / MICRO


def report(name: str, value: Tensor) -> None:
    """Print the mean over ranks, on rank 0."""
    mean = value.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{name} {mean.item() / dist.get_world_size():.7f}", flush=True)


def save(state: dict[str, Tensor]) -> None:
    """Where a script would call torch.save: on rank 0, with whole tensors."""
    if dist.get_rank() == 0:
        norm = sum(value.double().square().sum() for value in state.values()) ** 0.5
        print(f"saved {len(state)} tensors, norm {norm:.7f}", flush=True)
    # Gloo's threads free what they reduced last, and need Python for it. Where Python ends first,
    # the process now and then hangs or aborts: github.com/pytorch/pytorch/pull/179291.
    time.sleep(0.2)
    dist.destroy_process_group()
