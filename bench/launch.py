"""One launch of one mode: a fresh process that trains on the emulated network and measures.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout. Raises if a step
leaves communication in flight, because what it costs would then be nobody's.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench import emulator, host_link, profile
from bench.clock import measure_on
from bench.models import CONFIGS, Config, make_batch, make_model
from bench.modes import (
    BY_NAME,
    NO_LIMIT_BYTES,
    WARM_UP_STEPS,
    Link,
    Planner,
    Trainer,
    make_trainer,
    plan_of,
)
from bench.peaks import resident_bytes, step_peaks


@dataclass(frozen=True, slots=True)
class Request:
    mode: str
    config: str
    num_ranks: int
    gbits: tuple[float, ...]
    alpha_us: float
    num_steps: int
    poison: bool = False
    budget_bytes: int | None = None  # for a mode that is planned
    micro_steps: int = 1
    compute: str = ""  # folder of what `bench.profile` measured
    ranks_per_node: int = 0  # 0: all on one node
    inside: float = 1.0  # how many times faster links are inside a node
    host_gb_s: float = 0.0  # rate of a link to a host, each way; 0: there is none
    offload: str = "auto"  # option of graphshard
    warm_up: int = WARM_UP_STEPS  # steps before the first that is measured
    beside: bool = False  # another training, of a plan without a budget, takes turns with it
    replicas: int = 1  # of the shards (HSDP); those of one are neighbours

    @property
    def nodes(self) -> emulator.Nodes | None:
        return emulator.Nodes(self.ranks_per_node, self.inside) if self.ranks_per_node else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Virtual time of one step. busy = step - exposed; lane_us: sum over the collectives."""

    step_us: float
    exposed_us: float
    lane_us: float
    link_bytes: int
    collectives: int

    @property
    def busy_us(self) -> float:
        return self.step_us - self.exposed_us


@dataclass(frozen=True, slots=True)
class Rate:
    """One training at one rate of the link.

    predicted_*, lower_bound_us: of the plan, without the optimizer; 0 if it was made without costs.
    held_bytes: what the host holds from forward to backward. busy_ratio: of compute to that of a
    training without a budget, median of steps that took turns; predicted_busy_ratio: by the plans.
    """

    steps: list[StepTimes]
    resident_bytes: int
    gathered_peak_bytes: int
    step_peak_bytes: int
    predicted_us: float = 0.0
    predicted_peak_bytes: int = 0
    lower_bound_us: float = 0.0
    predicted_exposed_us: float = 0.0
    held_bytes: int = 0
    busy_ratio: float = 0.0
    predicted_busy_ratio: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.step_peak_bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """`rates` has one entry for each of `gbits`; `losses` are of all their steps, in order."""

    losses: list[float]
    rates: list[Rate]
    num_params: int


@dataclass(slots=True)
class Training:
    """A trainer on its way: what it is fed next, and the losses so far."""

    trainer: Trainer
    network: Any
    config: Config
    micro_steps: int
    losses: list[float]
    host: host_link.HostLink | None = None

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Of the next step."""
        first = len(self.losses) * self.micro_steps
        return [make_batch(self.config, first + index) for index in range(self.micro_steps)]

    def advance(self) -> None:
        self.losses.append(self.trainer.step(self.batches()).item())

    def measure(self) -> StepTimes:
        batches = self.batches()
        self.network.clear()
        if self.host is not None:
            self.host.waited_us = 0.0
        began_us = self.network.now_us()
        loss = self.trainer.step(batches)
        step_us = self.network.now_us() - began_us
        if self.network.in_flight():
            raise RuntimeError(f"{self.network.in_flight()} collectives outlive their step")
        self.losses.append(loss.item())
        sent: list[emulator.Transfer] = self.network.timeline()
        return StepTimes(
            step_us=step_us,
            exposed_us=sum(t.waited_us for t in sent) + (self.host.waited_us if self.host else 0.0),
            lane_us=sum(t.end_us - t.start_us for t in sent),
            link_bytes=sum(t.link_bytes for t in sent),
            collectives=len(sent),
        )


def run(request: Request) -> Measured:
    torch.set_num_threads(1)  # the clock is one thread's
    network = emulator.join(
        request.num_ranks,
        gbit=request.gbits[0],
        alpha_us=request.alpha_us,
        nodes=request.nodes,
        poison=request.poison,
    )
    measure_on(network)
    host = host_link.connect(network, request.host_gb_s) if request.host_gb_s else None
    mesh = _mesh(request)
    losses: list[float] = []
    rates: list[Rate] = []
    for gbit in request.gbits:
        emulator.set_rate(network, gbit=gbit, alpha_us=request.alpha_us, nodes=request.nodes)
        torch._dynamo.reset()
        training = start(request, gbit, network, mesh, host)
        other = None
        if request.beside:
            freely = replace(request, budget_bytes=NO_LIMIT_BYTES)
            other = start(freely, gbit, network, mesh, host)
        rates.append(measure(training, request.num_steps, other))
        losses += training.losses
    num_params = sum(p.numel() for p in training.trainer.model.parameters())
    return Measured(losses, rates, num_params)


def _mesh(request: Request) -> DeviceMesh:
    if request.replicas == 1:
        return init_device_mesh("cpu", (request.num_ranks,))
    shape = request.replicas, request.num_ranks // request.replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def start(
    request: Request,
    gbit: float,
    network: Any,
    mesh: DeviceMesh,
    host: host_link.HostLink | None = None,
) -> Training:
    """A new training, warm."""
    mode = BY_NAME[request.mode]
    config = CONFIGS[request.config]
    with tempfile.TemporaryDirectory() as folder:
        planner = None
        if request.budget_bytes is not None:
            path = profile.write(
                Path(folder),
                profile.path_in(Path(request.compute), mode.compute),
                num_ranks=request.num_ranks,
                gbit=gbit,
                alpha_us=request.alpha_us,
                nodes=request.nodes,
                host_gb_s=request.host_gb_s,
            )
            planner = Planner(request.budget_bytes, path, request.micro_steps, request.offload)
        link = Link(request.num_ranks, gbit, request.alpha_us)
        trainer = make_trainer(mode, make_model(config, request.num_ranks), mesh, link, planner)
        training = Training(trainer, network, config, request.micro_steps, [], host)
        for _ in range(request.warm_up):
            training.advance()
    return training


def measure(training: Training, num_steps: int, other: Training | None = None) -> Rate:
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # what importing and compiling left behind is not searched in each collection
    steps, ratios = [], []
    for _ in range(num_steps):
        steps.append(training.measure())
        if other is not None:
            ratios.append(steps[-1].busy_us / other.measure().busy_us)
    peaks = step_peaks(training.advance)
    plan = plan_of(training.trainer)
    estimate = None if plan is None else plan.estimate
    return Rate(
        steps=steps,
        resident_bytes=resident_bytes(training.trainer.optimizer),
        gathered_peak_bytes=peaks.gathered_bytes,
        step_peak_bytes=peaks.allocated_bytes,
        predicted_us=0.0 if estimate is None else estimate.step_time_us,
        predicted_peak_bytes=0 if estimate is None else estimate.peak_bytes,
        lower_bound_us=0.0 if estimate is None else estimate.lower_bound_us,
        predicted_exposed_us=0.0 if estimate is None else estimate.exposed_us,
        held_bytes=0 if plan is None else sum(g.offloaded_bytes for g in plan.groups),
        busy_ratio=median(ratios) if ratios else 0.0,
        predicted_busy_ratio=_predicted_busy_us(training) / _predicted_busy_us(other)
        if other is not None
        else 0.0,
    )


def _predicted_busy_us(training: Training) -> float:
    plan = plan_of(training.trainer)
    assert plan is not None
    return plan.estimate.step_time_us - plan.estimate.exposed_us


def main() -> None:
    request = json.loads(sys.argv[1])
    request["gbits"] = tuple(request["gbits"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
