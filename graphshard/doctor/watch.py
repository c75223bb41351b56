"""Watches one rank of the user's script and writes its facts.

In: the calls that `graphshard.doctor.attach` puts in front of torch's functions. Out: one JSON file
of `Facts` when the script ends, or is ended after the wanted steps. True afterwards: the script has
computed what it computes without the doctor; only time was taken, and is left out of step times.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphshard import fsdp2
from graphshard.doctor import describe
from graphshard.doctor.facts import Facts, GradientFacts, StepFacts

US_PER_S = 1e6
HIGH_WATER = "VmHWM:"


@dataclass(slots=True)
class StepWatch:
    """What was seen so far. `began` is when this step began, `lost_s` what the doctor took of it.

    world: rank and world size. replaced: parameters that `fully_shard` replaced, by id; weak, so
    that an unsharded model is freed. compiled: modules.
    functions: how many functions were compiled for graphshard. graphs: that `aot_eager` compiled.
    stale: by the optimizer's id.
    """

    mode: str
    folder: Path
    num_steps: int
    sharded: list[nn.Module] = field(default_factory=list)
    replaced: dict[int, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    compiled: list[nn.Module] = field(default_factory=list)
    functions: int = 0
    graphs: int = 0
    late: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    direct: dict[nn.Module, int] = field(default_factory=dict)
    stale: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    saves: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[StepFacts] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: tuple[GradientFacts, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    stepped: bool = False
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    lost_s: float = 0.0
    depth: int = 0
    peak_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    failure: str = ""
    world: tuple[int, int] = (0, 1)

    @property
    def roots(self) -> list[nn.Module]:
        return describe.roots_of(self.sharded)


def sharding(watch: StepWatch, modules: Sequence[nn.Module]) -> None:
    """Before `fully_shard(modules)`."""
    for module in modules:
        parent = next((p for p in watch.sharded if _is_inside(module, p)), None)
        if parent is not None:
            watch.late.append((module, parent))
        watch.replaced.update({id(p): weakref.ref(p) for p in module.parameters()})


def _is_inside(module: nn.Module, around: nn.Module) -> bool:
    return module is not around and any(module is inner for inner in around.modules())


def sharded(watch: StepWatch, modules: Sequence[nn.Module]) -> None:
    """After it: what is still registered was not replaced."""
    watch.sharded += modules
    for module in modules:
        for param in module.parameters():
            watch.replaced.pop(id(param), None)
    watch.world = describe.world_of()
    watch.device = fsdp2.device_of(fsdp2.state_of(modules[0]))


@contextmanager
def aside(watch: StepWatch) -> Iterator[None]:
    """Time and memory that the doctor itself takes do not count."""
    _synchronize(watch.device)
    began = time.perf_counter()
    if watch.steps:
        watch.peak_bytes = max(watch.peak_bytes, _peak_bytes(watch.device))
    try:
        yield
    finally:
        _synchronize(watch.device)
        _forget_peak(watch.device)
        watch.lost_s += time.perf_counter() - began


def before_backward(watch: StepWatch, losses: Sequence[Tensor]) -> None:
    """Ends the step before, if an optimizer made one; raises SystemExit after the last one."""
    if watch.stepped:
        _end_step(watch)
    if watch.num_steps and len(watch.steps) >= watch.num_steps:
        write(watch)  # a process of multiprocessing runs nothing at exit
        raise SystemExit(0)
    with aside(watch), torch.no_grad():
        watch.losses.append(float(sum(loss.detach().double().sum() for loss in losses)))


def after_backward(watch: StepWatch) -> None:
    with aside(watch):
        watch.gradients = describe.gradients_of(watch.roots)


def before_update(watch: StepWatch, optimizer: torch.optim.Optimizer) -> None:
    if id(optimizer) in watch.stale:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = sum(_is_replaced(watch, param) for param in params)
    watch.stale[id(optimizer)] = (type(optimizer).__name__, stale, len(params))


def _is_replaced(watch: StepWatch, param: Tensor) -> bool:
    known = watch.replaced.get(id(param))
    return known is not None and known() is param


def after_update(watch: StepWatch) -> None:
    _synchronize(watch.device)
    watch.stepped, watch.ended = True, time.perf_counter()


def _end_step(watch: StepWatch) -> None:
    count = watch.counts.get
    watch.steps.append(
        StepFacts(
            losses=tuple(watch.losses),
            gradients=watch.gradients,
            all_gathers=count("all_gathers", 0),
            reduce_scatters=count("reduce_scatters", 0),
            other_collectives=count("other", 0),
            time_us=(watch.ended - watch.began - watch.lost_s) * US_PER_S,
        )
    )
    watch.losses, watch.gradients, watch.counts = [], (), {}
    watch.stepped, watch.began, watch.lost_s = False, watch.ended, 0.0


def saving(watch: StepWatch, value: Any, file: Any) -> None:
    found = describe.sharded_tensors(value)
    if found:
        name = getattr(file, "name", None) or file
        path = str(name) if isinstance(name, str | Path) else "a buffer"
        watch.saves.append((path, len(found), describe.local_bytes(found)))


def write(watch: StepWatch) -> None:
    """The facts so far; none of a process that is no rank: it neither sharded nor called backward.

    A rank that failed before has a failure to tell.
    """
    failed = watch.failure and "RANK" in os.environ
    if not (watch.sharded or watch.late or watch.losses or watch.steps or failed):
        return
    if watch.stepped:
        _end_step(watch)
    if watch.steps:
        watch.peak_bytes = max(watch.peak_bytes, _peak_bytes(watch.device))
    if not watch.sharded:
        watch.world = describe.world_of()
    path = watch.folder / f"{watch.mode}.{watch.world[0]}.json"
    part = path.with_suffix(".part")
    part.write_text(facts_of(watch).to_json(), encoding="utf-8")
    part.replace(path)  # what the parent finds is whole


def facts_of(watch: StepWatch) -> Facts:
    roots = watch.roots
    names = describe.names_of(roots)
    groups = describe.describe_groups(roots)
    rank, world_size = watch.world

    def name(module: nn.Module) -> str:
        return names.get(module, type(module).__name__)

    return Facts(
        mode=watch.mode,
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        device=str(watch.device),
        device_id=_device_id(watch.device),
        numel=describe.numel_of(roots),
        groups=groups,
        stacks=tuple(describe.describe_stacks(roots)),
        steps=tuple(watch.steps),
        latency_bytes=max(
            (describe.latency_bytes(ranks, watch.device) for ranks in _sizes(groups)), default=0
        ),
        peak_bytes=watch.peak_bytes,
        direct_forwards=tuple((name(m), count) for m, count in watch.direct.items()),
        late_children=tuple((name(child), name(parent)) for child, parent in watch.late),
        stale_optimizers=tuple(found for found in watch.stale.values() if found[1]),
        saves=tuple(watch.saves),
        is_exact=describe.is_exact(roots),
        aot_graphs=watch.graphs,
        failure=watch.failure,
    )


def _sizes(groups: Sequence[Any]) -> list[int]:
    return sorted({group.ranks for group in groups if group.ranks > 1})


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_id(device: torch.device) -> str:
    """Of the GPU itself: each rank may see its own one as number 0."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _peak_bytes(device: torch.device) -> int:
    """Since `_forget_peak`: what the allocator gave out; on a CPU what the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(s.split()[1]) * 1024 for s in lines if s.startswith(HIGH_WATER)), 0)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        # 5 sets the high-water mark to what is resident now (proc(5)).
        with suppress(OSError):  # a container may forbid it; then the peak is that of the whole run
            Path("/proc/self/clear_refs").write_text("5")


def describe_failure(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
