"""One launch of one mode: a fresh process that trains on the emulated network and measures.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout. Raises if a step
leaves communication in flight, because what it costs would then be nobody's.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import emulator
from bench.memory import resident_bytes, step_peaks
from bench.models import CONFIGS, Config, make_batch, make_model
from bench.modes import MODES, Trainer, make_trainer

WARM_UP_STEPS = 3  # the first one compiles and makes the optimizer's state


@dataclass(frozen=True, slots=True)
class Request:
    mode: str
    config: str
    num_ranks: int
    gbits: tuple[float, ...]
    alpha_us: float
    num_steps: int
    poison: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Virtual time of one step. busy = step - exposed; lane_us: sum over the collectives."""

    step_us: float
    exposed_us: float
    lane_us: float
    link_bytes: int
    collectives: int


@dataclass(frozen=True, slots=True)
class Measured:
    """`losses` of all steps, in order; `rates` has one list of steps for each of `gbits`."""

    losses: list[float]
    rates: list[list[StepTimes]]
    num_params: int
    resident_bytes: int
    gathered_peak_bytes: int
    step_peak_bytes: int


@dataclass(slots=True)
class Training:
    """A trainer on its way: what it is fed next, and the losses so far."""

    trainer: Trainer
    network: Any
    config: Config
    losses: list[float]

    def advance(self) -> None:
        tokens, targets = make_batch(self.config, len(self.losses))
        self.losses.append(self.trainer.step(tokens, targets).item())

    def measure(self) -> StepTimes:
        tokens, targets = make_batch(self.config, len(self.losses))
        self.network.clear()
        began_us = self.network.now_us()
        loss: Tensor = self.trainer.step(tokens, targets)
        step_us = self.network.now_us() - began_us
        if self.network.in_flight():
            raise RuntimeError(f"{self.network.in_flight()} collectives outlive their step")
        self.losses.append(loss.item())
        sent: list[emulator.Transfer] = self.network.timeline()
        return StepTimes(
            step_us=step_us,
            exposed_us=sum(t.waited_us for t in sent),
            lane_us=sum(t.end_us - t.start_us for t in sent),
            link_bytes=sum(t.link_bytes for t in sent),
            collectives=len(sent),
        )


def run(request: Request) -> Measured:
    torch.set_num_threads(1)  # the clock is one thread's
    mode = next(m for m in MODES if m.name == request.mode)
    config = CONFIGS[request.config]
    network = emulator.join(
        request.num_ranks,
        gbit=request.gbits[0],
        alpha_us=request.alpha_us,
        poison=request.poison,
    )
    mesh = init_device_mesh("cpu", (request.num_ranks,))
    model = make_model(config, request.num_ranks)
    num_params = sum(p.numel() for p in model.parameters())
    training = Training(make_trainer(mode, model, mesh), network, config, [])
    for _ in range(WARM_UP_STEPS):
        training.advance()
    gc.collect()
    gc.freeze()  # what importing left behind is not searched in each collection
    rates = []
    for gbit in request.gbits:
        emulator.set_rate(network, gbit=gbit, alpha_us=request.alpha_us)
        training.advance()
        rates.append([training.measure() for _ in range(request.num_steps)])
    resident = resident_bytes(training.trainer.optimizer)
    peaks = step_peaks(training.advance)
    return Measured(
        losses=training.losses,
        rates=rates,
        num_params=num_params,
        resident_bytes=resident,
        gathered_peak_bytes=peaks.gathered_bytes,
        step_peak_bytes=peaks.allocated_bytes,
    )


def main() -> None:
    request = json.loads(sys.argv[1])
    request["gbits"] = tuple(request["gbits"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
