"""One launch of one setting: a fresh process that runs the code which `graphshard tune` writes, on
the emulated network, and measures.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import emulator
from bench.clock import measure_on
from bench.models import CONFIGS, make_batch, make_model
from bench.modes import WARM_UP_STEPS, AsyncReduceScatter, Trainer
from bench.pace import keep_pace, pace_of
from graphshard.compiler import planning_inputs


@dataclass(frozen=True, slots=True)
class Request:
    """code: a file as `graphshard tune` writes it. machine: path of a profile. pace_us: of the
    machine when it was made (`bench.pace`)."""

    code: str
    machine: str
    config: str
    num_ranks: int
    ranks_per_node: int
    inside: float
    gbit: float
    alpha_us: float
    compute: str
    num_steps: int
    pace_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Virtual time of whole steps, and of their forwards and backwards alone, at one pace."""

    steps_us: tuple[float, ...]
    model_us: tuple[float, ...]
    losses: tuple[float, ...]


def run(request: Request) -> Measured:
    torch.set_num_threads(1)  # the clock is one thread's
    network = emulator.join(
        request.num_ranks,
        gbit=request.gbit,
        alpha_us=request.alpha_us,
        nodes=emulator.Nodes(request.ranks_per_node, request.inside),
    )
    measure_on(network)
    # The ranks that this process stands for do agree.
    planning_inputs.may_add_process_groups = lambda ballots: True
    code: dict[str, Any] = {}
    exec(compile(Path(request.code).read_text(), request.code, "exec"), code)
    config = replace(CONFIGS[request.config], batch=code["SIZES"]["batch"])
    model = code["shard"](make_model(config, request.num_ranks), device_type="cpu")
    options = code["OPTIONS"] | {"machine": request.machine, "compute": request.compute}
    options |= {"fallback": "error", "verify": "off", "replan_after": 0}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clock = Clock(network.now_us, optimizer)
    pace = pace_of(config, request.num_ranks)
    syncs_last = not code.get("SYNC_EACH", True)
    trainer = Trainer(model, clock, AsyncReduceScatter(), syncs=syncs_last)
    steps_us, model_us, losses = [], [], []
    for step in range(WARM_UP_STEPS + request.num_steps):
        first = step * code["MICRO_STEPS"]
        batches = [make_batch(config, first + n) for n in range(code["MICRO_STEPS"])]
        keep_pace(network, pace, request.pace_us)
        began_us = network.now_us()
        losses.append(trainer.step(batches).item())
        steps_us.append(network.now_us() - began_us)
        model_us.append(clock.began_us - began_us)
        if network.in_flight():
            raise RuntimeError(f"{network.in_flight()} collectives outlive their step")
    measured = (tuple(times[WARM_UP_STEPS:]) for times in (steps_us, model_us))
    return Measured(*measured, tuple(losses))


@dataclass(slots=True)
class Clock:
    """An optimizer that notes when its step began."""

    now_us: Callable[[], float]
    optimizer: torch.optim.Optimizer
    began_us: float = 0.0

    def step(self) -> None:
        self.began_us = self.now_us()
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def main() -> None:
    print(json.dumps(asdict(run(Request(**json.loads(sys.argv[1]))))), flush=True)


if __name__ == "__main__":
    main()
