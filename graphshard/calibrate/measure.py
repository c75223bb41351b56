"""Times single collectives and kernels on the ranks and the device of the running job.

Out come microseconds: of a collective the same on every rank of its group, of a kernel this
rank's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from graphshard.cost.comm import CollectiveKind
from graphshard.runtime.timed import ALL_GATHER, collective, elapsed_us, product

# The shape of common language models: heads of 64 or 128.
ATTENTION_HEADS = 8
ATTENTION_DIM = 64
WARMUPS = 2
MIN_REPETITIONS = 3
# A size that takes long is repeated less, a kernel that takes little is run in batches.
BUDGET_US = 5e5
BATCH_US = 500.0


def collective_time_us(
    kind: CollectiveKind,
    size_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    repetitions: int,
) -> float:
    """Median time of one collective of `size_bytes` (of the whole) on `group`.

    Collective: every rank of the group calls it with the same arguments, gets the same value.
    """
    run = collective(kind, size_bytes, group, device)
    slowest_us = max(_round_us(run, kind, group, device) for _ in range(WARMUPS))
    affordable = int(BUDGET_US / slowest_us)
    count = max(MIN_REPETITIONS, min(repetitions, affordable))
    return median(_round_us(run, kind, group, device) for _ in range(count))


def matmul_time_us(size: int, dtype: torch.dtype, device: torch.device, repetitions: int) -> float:
    """Median time of a product of two random `size` x `size` matrices."""
    return _kernel_us(product(size, dtype, device), device, repetitions)


def attention_time_us(
    length: int, dtype: torch.dtype, device: torch.device, repetitions: int
) -> float:
    """Median time of causal attention over `length` tokens: ATTENTION_HEADS of ATTENTION_DIM."""
    shape = (1, ATTENTION_HEADS, length, ATTENTION_DIM)
    q, k, v = (torch.rand(shape, device=device).to(dtype) for _ in range(3))

    def run() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _kernel_us(run, device, repetitions)


def pointwise_time_us(size_bytes: int, device: torch.device, repetitions: int) -> float:
    """Median time of a pointwise op that reads `size_bytes` and writes as much to new memory."""
    source = torch.ones(max(1, size_bytes // 4), device=device)
    return _kernel_us(lambda: source * 2.0, device, repetitions)


def host_copy_time_us(size_bytes: int, device: torch.device, repetitions: int) -> float:
    """Median time of a copy of `size_bytes` to pinned memory of the host, or back; the longer."""
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    ways = (
        lambda: here.copy_(there, non_blocking=True),
        lambda: there.copy_(here, non_blocking=True),
    )
    return max(_kernel_us(way, device, repetitions) for way in ways)


def _round_us(
    run: Callable[[], dist.Work],
    kind: CollectiveKind,
    group: dist.ProcessGroup,
    device: torch.device,
) -> float:
    """One collective, without the time that a rank waits for peers that have not come yet.

    Clocks of different nodes cannot be compared, durations can. Every rank measures its own; the
    rank that came last waited for nobody, so the shortest duration is from the last start on. The
    root of a broadcast may leave before its bytes have arrived, so it does not count.
    """
    dist.barrier(group)
    own = elapsed_us(lambda: run().wait(), device)
    every = torch.empty(group.size(), dtype=torch.float64, device=device)
    mine = torch.tensor([own], dtype=torch.float64, device=device)
    ALL_GATHER(every, mine, group=group)
    durations = every.tolist()
    if kind is CollectiveKind.BROADCAST and len(durations) > 1:
        durations = durations[1:]
    return float(min(durations))


def _kernel_us(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median over repetitions; short kernels run in batches, as they do in a step.

    On one CPU thread it is that thread's own time: other programs on the machine do not count.
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time_ns if one_thread else time.perf_counter_ns
    first_us = min(elapsed_us(run, device, clock) for _ in range(WARMUPS))
    batch = max(1, int(BATCH_US / max(first_us, 1.0)))

    def several() -> None:
        for _ in range(batch):
            run()

    count = max(MIN_REPETITIONS, min(repetitions, int(BUDGET_US / max(first_us * batch, 1.0))))
    return median(elapsed_us(several, device, clock) / batch for _ in range(count))
