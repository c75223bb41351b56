"""One launch of one way: a fresh process that trains on one device in real time.

In: `Request` as JSON in argv[1]. Out: `Measured` as JSON, the last line on stdout. With one rank
the process group is NCCL's (on a CPU gloo's); with more the others and the network are emulated.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from bench import gpu_network
from bench.models import Config, Llama, WithLoss
from bench.ways import WAYS, compile_as, shard
from graphshard.cost.presets import preset

CONFIGS = {
    "1B": Config(2048, 18, 32, 5632, 32_000, 2048, batch=4),  # 1.06 B parameters
    "tiny": Config(32, 2, 2, 64, 64, 16),
}


RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Request:
    """ranks: of which all but one are emulated, with the network of the preset `network`.

    checkpointed: every block is, by hand. offloads: `CPUOffloadPolicy`, in pinned memory. options:
    of graphshard, over those of the way.
    """

    way: str
    config: str
    device: str
    num_steps: int
    num_warm_up: int
    ranks: int = 1
    network: str = ""
    checkpointed: bool = False
    offloads: bool = False
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """step_us: of forward, backward and optimizer, until the device is through.

    host_us: until the host had issued the step, which began with an idle device. The host waits
    once about a thousand kernels are queued, so it is at most this. peak_bytes: of the measured
    steps, 0 on a CPU. losses: of all steps, warm-up included. grads_us: of forward and backward
    alone, until the device is through. expected: what graphshard's plan says of those, by the
    device's preset.
    """

    step_us: list[float]
    host_us: list[float]
    losses: list[float]
    first_s: float
    peak_bytes: int
    num_params: int
    device_name: str
    grads_us: list[float]
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """held_bytes: of activations, by the host."""

    grads_us: float
    peak_bytes: int
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds from an idle device. host: until the step was issued."""

    step_us: float
    host_us: float
    grads_us: float


def run(request: Request) -> Measured:
    config, device = CONFIGS[request.config], torch.device(request.device)
    (way,) = (way for way in WAYS if way.name == request.way)
    torch.manual_seed(0)
    with device:
        model = WithLoss(Llama(config)).to(torch.bfloat16)
    num_params = sum(param.numel() for param in model.parameters())
    if request.checkpointed:
        model.model.layers = nn.ModuleList(checkpoint_wrapper(b) for b in model.model.layers)
    blocks = list(model.model.layers)
    how = {}
    if request.offloads:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    shard(way, model, blocks, init_device_mesh(device.type, (request.ranks,)), how)
    machine = {"machine": request.network} if request.network else {}
    compile_as(way, model, blocks, {**machine, **request.options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (2, config.batch, config.seq_len)
    tokens, targets = torch.randint(config.vocabulary, shape, device=device)
    losses: list[Tensor] = []

    def gradients() -> None:
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.detach().clone())  # CUDA graphs write the next one to its place

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    first_s = timed(gradients, update, device, request.offloads).step_us / 1e6
    for _ in range(request.num_warm_up):
        timed(gradients, update, device, request.offloads)
    gc.collect()
    gc.freeze()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [timed(gradients, update, device, request.offloads) for _ in range(request.num_steps)]
    return Measured(
        step_us=[each.step_us for each in times],
        host_us=[each.host_us for each in times],
        grads_us=[each.grads_us for each in times],
        expected=expected(model) if way.compiler == "graphshard" else None,
        losses=[loss.item() for loss in losses],
        first_s=first_s,
        peak_bytes=torch.cuda.max_memory_allocated() if on_cuda else 0,
        num_params=num_params,
        device_name=torch.cuda.get_device_name() if on_cuda else "cpu",
    )


def timed(
    gradients: Callable[[], None], update: Callable[[], None], device: torch.device, on_host: bool
) -> Timed:
    """on_host: the optimizer is the host's, which waits for the gradients."""
    synchronize(device)
    began = time.perf_counter()
    gradients()
    event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" and not on_host else None
    if event is not None:
        event.record()
    else:
        synchronize(device)
    halfway = time.perf_counter()
    update()
    issued = time.perf_counter()
    if event is not None:
        event.synchronize()  # nothing is queued behind the optimizer
        halfway = time.perf_counter()
    synchronize(device)
    return Timed(*(1e6 * (end - began) for end in (time.perf_counter(), issued, halfway)))


def expected(model: nn.Module) -> Expected | None:
    """Of the model's newest plan."""
    import graphshard

    plan = graphshard.plans(model)[-1]
    held_bytes = sum(group.offloaded_bytes for group in plan.groups)
    ours = plan.estimate and plan.estimate.ours
    return ours and Expected(ours.step_time_us, ours.peak_bytes, held_bytes)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        if request.ranks > 1:
            os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)  # as torchrun says it
            device = torch.device(request.device)
            gpu_network.join(preset(request.network), request.ranks, RANKS_PER_NODE, device)
        else:
            backend = "nccl" if request.device == "cuda" else "gloo"
            store = dist.FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(backend, rank=0, world_size=1, store=store)
        measured = run(request)
        dist.destroy_process_group()
    print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
