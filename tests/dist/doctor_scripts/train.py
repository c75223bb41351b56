"""A small FSDP2 training script that does what its arguments name wrong: `train.py [FAULT ...]`."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = 5
DIM = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stubborn(Block):
    """Dynamo cannot trace it."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, faults):
        super().__init__()
        kinds = [Block, Stubborn if "never-captured" in faults else Block, Block]
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(DIM, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Holder(nn.Module):
    """Has no parameters of its own, so that its forward works without fully_shard's hooks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def shard(model, faults):
    if "top-down" in faults:
        fully_shard(model)
    if "linears" in faults:
        for layer in model.layers:
            fully_shard(layer.up)
            fully_shard(layer.down)
    if not {"root-only", "linears"} & faults:
        for layer in model.layers:
            fully_shard(layer)
    fully_shard(model)


def drop_reduction(name):
    """One group's gradients stay what this rank alone computed, in graphshard's run only."""
    if os.environ.get("GRAPHSHARD_DISABLE") == "1":
        return
    from graphshard.runtime import reduce

    original = reduce.reduce_scatter

    def dropped(output, packed, *rest):
        work = original(output, packed, *rest)
        work.wait()
        frame = sys._getframe(1)
        if frame.f_locals["self"].live.fqn == name:
            output.copy_(packed.view(dist.get_world_size(), -1)[dist.get_rank()])
        return None

    reduce.reduce_scatter = dropped


def main(faults):
    dist.init_process_group("gloo")
    if "no-seed" not in faults:
        torch.manual_seed(int.from_bytes(os.urandom(4)) if "by-chance" in faults else 0)
    if "dropped-reduction" in faults:
        drop_reduction("layers.2")
    model = Model(faults)
    early = "optimizer-first" in faults
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if early else None
    if "compile-first" in faults:
        model.compile(backend="graphshard")
    shard(model, faults)
    if "forward" in faults:
        model = fully_shard(Holder(model))
    if not {"compile-first", "no-compile"} & faults:
        model.compile(backend="graphshard")
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())  # other data on each rank
    for step in range(STEPS):
        x = torch.randn(8, DIM, generator=generator)
        out = model.forward(x) if "forward" in faults else model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "torch-save" in faults and step == 1 and dist.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"model": model.state_dict()}, os.path.join(folder, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(set(sys.argv[1:]))
