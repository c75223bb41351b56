"""One launch of one way: a fresh process that steps through many tiny groups of parameters.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout. Nothing is in
flight after a step (the emulated network raises otherwise).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench import emulator
from bench.ways import WAYS, compile_as, shard

WIDTH = 8
LINEARS = 5  # in a group, each with a bias
PARAMS_PER_GROUP = 2 * LINEARS
ROWS = 4  # of the input
FREE_GBIT = 1e9  # at which a byte takes 8e-9 us


@dataclass(frozen=True, slots=True)
class Request:
    way: str
    num_params: int
    num_ranks: int
    num_steps: int
    num_warm_up: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Virtual time. forward_us is the first part of step_us; exposed_us the waiting in it."""

    step_us: float
    forward_us: float
    exposed_us: float
    collectives: int


@dataclass(frozen=True, slots=True)
class Measured:
    """first_s: real seconds of the first step, which compiles."""

    steps: list[StepTimes]
    first_s: float


class Group(nn.Module):
    """Not nn.Sequential, which Dynamo does not compile by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class Tiny(nn.Module):
    """The sum of its output is the loss."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(Group() for _ in range(num_groups))

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return x.sum()


def run(request: Request) -> Measured:
    torch.set_num_threads(1)  # the clock is one thread's
    torch.manual_seed(0)
    network = emulator.join(request.num_ranks, gbit=FREE_GBIT, alpha_us=0.0)
    mesh = init_device_mesh("cpu", (request.num_ranks,))
    (way,) = (way for way in WAYS if way.name == request.way)
    model = Tiny(request.num_params // PARAMS_PER_GROUP)
    groups = list(model.groups)
    shard(way, model, groups, mesh)
    compile_as(way, model, groups)
    params, x = list(model.parameters()), torch.randn(ROWS, WIDTH)
    began = time.perf_counter()
    step(model, x, params, network)
    first_s = time.perf_counter() - began
    for _ in range(request.num_warm_up):
        step(model, x, params, network)
    gc.collect()
    gc.freeze()  # what importing and compiling left behind is not searched in each collection
    steps = [step(model, x, params, network) for _ in range(request.num_steps)]
    return Measured(steps, first_s)


def step(model: Any, x: Tensor, params: list[nn.Parameter], network: Any) -> StepTimes:
    """Forward, backward, and the gradients dropped. Raises RuntimeError if one is missing."""
    network.clear()  # raises if the step before left something in flight
    began_us = network.now_us()
    loss = model(x)
    forward_us = network.now_us() - began_us
    loss.backward()
    step_us = network.now_us() - began_us
    missing = sum(param.grad is None for param in params)
    if missing:
        raise RuntimeError(f"{missing} of {len(params)} parameters have no gradient")
    dropping_us = network.now_us()
    for param in params:
        param.grad = None
    step_us += network.now_us() - dropping_us
    sent = network.timeline()
    return StepTimes(step_us, forward_us, sum(t.waited_us for t in sent), len(sent))


def main() -> None:
    print(json.dumps(asdict(run(Request(**json.loads(sys.argv[1]))))), flush=True)


if __name__ == "__main__":
    main()
