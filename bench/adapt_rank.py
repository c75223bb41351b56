"""One rank of bench/adapt.py: trains without any option, and notes each step and what ran in it.

In: `Request` as JSON in argv[1]; torchrun's environment, inside a namespace of `bench.netns`. Out:
`Trained` as JSON, the last line on stdout. Both ranks begin each step together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import Process

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import netns
from bench.models import CONFIGS, Llama, WithLoss, make_batch
from bench.modes import BY_NAME, Link, make_trainer
from graphshard import plans

BUSY_S = 3.0  # another process is busy for so long, then idle for as long


@dataclass(frozen=True, slots=True)
class Request:
    """rates: of the link in gbit, each with the number of steps that it holds for. noisy: another
    process of the machine is busy half of the time."""

    config: str
    rates: tuple[tuple[float, int], ...]
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Trained:
    """Of each step: its time, and the number of the plan that ran, counted as they came."""

    step_us: tuple[float, ...]
    plan: tuple[int, ...]
    loss: tuple[float, ...]


def run(request: Request) -> Trained:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIGS[request.config]
    torch.manual_seed(0)
    model = WithLoss(Llama(config))
    link = Link(world, request.rates[0][0], 200.0)
    mesh = init_device_mesh("cpu", (world,))
    trainer = make_trainer(BY_NAME["fused"], model, mesh, link)
    step_us, plan, loss, orders = [], [], [], list[str]()
    rates = [gbit for gbit, count in request.rates for _ in range(count)]
    with another_process() if request.noisy and rank == 0 else nothing():
        for index, gbit in enumerate(rates):
            if index and gbit != rates[index - 1]:
                netns.limit_own(gbit)
            batch = make_batch(config, world * index + rank)
            dist.barrier()
            began = time.perf_counter()
            found = trainer.step([batch])
            step_us.append((time.perf_counter() - began) * 1e6)
            loss.append(found.item())
            order = str([schedule.steps for p in plans(model) for schedule in p.schedules])
            orders += [order] if order not in orders else []
            plan.append(orders.index(order))
    dist.barrier()
    dist.destroy_process_group()
    return Trained(tuple(step_us), tuple(plan), tuple(loss))


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def another_process() -> Iterator[None]:
    process = Process(target=_busy_half_of_the_time, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _busy_half_of_the_time() -> None:
    while True:
        until = time.perf_counter() + BUSY_S
        while time.perf_counter() < until:
            pass
        time.sleep(BUSY_S)


def main() -> None:
    request = json.loads(sys.argv[1])
    request["rates"] = tuple((gbit, count) for gbit, count in request["rates"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
