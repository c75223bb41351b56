"""One launch of bench/single.py: one model, as each way compiles it, in turns on one process.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout. Time is the CPU
time of the one thread that computes, forward and backward, without the optimizer.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from bench.models import CONFIGS, Llama, WithLoss, make_batch
from bench.rounds import turns
from bench.ways import WAYS, compile_as, shard
from examples import tiny_llama
from graphshard.capture.root_state import root_states_under

DEMO = "demo"
DEMO_BATCH = 4  # of examples/train.py, like the sizes below
WARM_UP_STEPS = 3


class Demo(nn.Module):
    """The model of `make demo` with its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = tiny_llama.LlamaConfig(256, 8, 128)
        self.model = tiny_llama.Llama(config)
        self.model.rope = tiny_llama.rope_table(config.seq_len, config.head_dim, "cpu")
        for param in self.model.parameters():  # its own initialisation is for sharded parameters
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    ways: tuple[str, ...]
    num_steps: int
    first: int


@dataclass(frozen=True, slots=True)
class Measured:
    """By way: milliseconds of each step (the i-th steps of all ways were neighbours), the loss, and
    of graphshard the number of regions and of distinct ones among them."""

    steps_ms: dict[str, list[float]]
    losses: dict[str, float]
    regions: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Model:
    module: nn.Module
    batch: tuple[Tensor, Tensor]


def make(name: str, way_name: str) -> Model:
    """Compiled at its first call."""
    (way,) = (way for way in WAYS if way.name == way_name)
    torch.manual_seed(0)
    if name == DEMO:
        module: nn.Module = Demo()
        blocks = module.blocks
        tokens = torch.randint(tiny_llama.VOCABULARY, (2, DEMO_BATCH, 128))
        batch = tokens[0], tokens[1]
    else:
        module = WithLoss(Llama(CONFIGS[name]))
        blocks = list(module.model.layers)
        batch = make_batch(CONFIGS[name], 0)
    shard(way, module, blocks, init_device_mesh("cpu", (1,)) if way.sharding else None)
    compile_as(way, module, blocks)
    return Model(module, batch)


def step(model: Model) -> tuple[float, float]:
    """Milliseconds, and the loss."""
    model.module.zero_grad()
    began = time.thread_time()
    loss = model.module(*model.batch)
    loss.backward()
    return 1e3 * (time.thread_time() - began), loss.item()


def run(request: Request) -> Measured:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = {}
    for name in request.ways:
        torch._dynamo.reset()
        models[name] = make(request.model, name)
        for _ in range(WARM_UP_STEPS):
            step(models[name])
    steps_ms: dict[str, list[float]] = {name: [] for name in request.ways}
    losses = {}
    for index in range(request.num_steps):
        for name in turns(request.ways, request.first + index):
            took_ms, losses[name] = step(models[name])
            steps_ms[name].append(took_ms)
    regions = {
        name: found
        for name, model in models.items()
        if root_states_under(model.module)
        for found in graphshard.explain(model.module).regions.values()
    }
    return Measured(steps_ms, losses, regions)


def main() -> None:
    request = json.loads(sys.argv[1])
    request["ways"] = tuple(request["ways"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
