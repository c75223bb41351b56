"""One collective or kernel that is run to be timed, outside of any step.

Who measures a machine (`graphshard.calibrate`) and who asks how fast this job's network and device
are (`graphshard.runtime.probe`) run the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.cost.comm import CollectiveKind
from graphshard.fsdp2.versions import TORCH

if TORCH >= (2, 13):
    ALL_GATHER, REDUCE_SCATTER = dist.all_gather_single, dist.reduce_scatter_single
else:
    ALL_GATHER, REDUCE_SCATTER = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def collective(
    kind: CollectiveKind, size_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], dist.Work]:
    """Issues one of `size_bytes` (of the whole, rounded down to float32 of equal ranks)."""
    ranks = group.size()
    part = torch.zeros(max(1, size_bytes // 4 // ranks), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    match kind:
        case CollectiveKind.ALL_GATHER:
            return lambda: ALL_GATHER(whole, part, group=group, async_op=True)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda: REDUCE_SCATTER(part, whole, group=group, async_op=True)
        case CollectiveKind.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group, async_op=True)
        case CollectiveKind.BROADCAST:
            root = dist.get_global_rank(group, 0)
            return lambda: dist.broadcast(whole, root, group=group, async_op=True)


def product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Multiplies two random `size` x `size` matrices, without the user's random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.rand(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def elapsed_us(
    run: Callable[[], object], device: torch.device, clock: Callable[[], int] | None = None
) -> float:
    """Duration of `run` by `clock` (nanoseconds; None: the wall's) on a CPU, of what it enqueues on
    any other device."""
    if device.type == "cpu":
        now_ns = clock or time.perf_counter_ns
        start_ns = now_ns()
        run()
        return (now_ns() - start_ns) / 1e3
    start, stop = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
