"""One rank of bench/sockets.py: all modes train in turns in one process, step by step.

In: `Request` as JSON in argv[1]; torchrun's environment. Out: `Measured` as JSON, the last line on
stdout. Both ranks begin each step together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.models import CONFIGS, Llama, WithLoss, make_batch
from bench.modes import BY_NAME, NO_LIMIT_BYTES, Link, Planner, make_trainer
from bench.rounds import turns
from graphshard.calibrate.calibrate import calibrate

# What tunes itself has settled then (docs/how-it-decides.md).
WARM_UP_STEPS = 13


@dataclass(frozen=True, slots=True)
class Request:
    modes: tuple[str, ...]
    config: str
    gbit: float
    num_steps: int
    first: int
    folder: str


@dataclass(frozen=True, slots=True)
class Times:
    """One step: wall time, CPU time of this process, and of all processes of the machine."""

    wall_us: float
    own_us: float
    machine_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    steps: dict[str, list[Times]]
    losses: dict[str, list[float]]


def machine_us() -> float:
    """CPU time that all processes have used, in steps of 10 ms (man 5 proc: /proc/stat)."""
    user, nice, system, _idle, _wait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return 1e4 * (user + nice + system + irq + softirq)


def run(request: Request) -> Measured:
    torch.set_num_threads(1)
    # Nothing is remembered of an earlier launch.
    os.environ["GRAPHSHARD_CACHE_DIR"] = str(Path(request.folder) / f"cache{request.first}")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    profile = Path(request.folder) / f"profile{rank}.json"
    groups = {"world": mesh.get_group()}
    profile.write_text(calibrate(groups, torch.device("cpu")).to_json())
    config = CONFIGS[request.config]
    trainers = {}
    for name in request.modes:
        mode = BY_NAME[name]
        torch.manual_seed(0)
        model = WithLoss(Llama(config))
        planner = Planner(NO_LIMIT_BYTES, profile) if mode.within else None
        trainers[name] = make_trainer(mode, model, mesh, Link(world, request.gbit, 200.0), planner)
    steps: dict[str, list[Times]] = {name: [] for name in request.modes}
    losses: dict[str, list[float]] = {name: [] for name in request.modes}
    for index in range(WARM_UP_STEPS + request.num_steps):
        batch = make_batch(config, world * index + rank)
        for name in turns(request.modes, request.first + index):
            dist.barrier()
            before = time.perf_counter_ns(), time.process_time_ns(), machine_us()
            loss = trainers[name].step([batch])
            after = time.perf_counter_ns(), time.process_time_ns(), machine_us()
            losses[name].append(loss.item())
            if index >= WARM_UP_STEPS:
                wall, own, machine = (b - a for a, b in zip(before, after, strict=True))
                steps[name].append(Times(wall / 1e3, own / 1e3, machine))
    dist.barrier()
    dist.destroy_process_group()
    return Measured(steps, losses)


def main() -> None:
    request = json.loads(sys.argv[1])
    request["modes"] = tuple(request["modes"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
