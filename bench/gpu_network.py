"""An emulated network between GPUs: this process is rank 0 of N, and the one device is rank 0's.

In: a machine whose links are emulated, and the number of ranks. Out: torch.distributed with a
backend whose collectives occupy a stream of the device for as long as the machine's model says, in
order, beside compute, and touch the memory that they would touch. What other ranks would send is
taken to be what this one sends: an all-gather repeats its part, a reduction gives it back. On a CPU
nothing takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import Machine, collective_us

BACKEND = "emulated_gpu"
SPIN_CYCLES = 20_000_000


class Occupied(dist.Work):
    """A collective on its stream. Until it is waited for it holds its tensors, as NCCL does."""

    def __init__(self, done: torch.cuda.Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._done, self._tensors = done, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is not None:
            self._done.wait()  # the current stream waits, the host does not
        self._tensors = ()
        return True


class Named:
    """What a group says of the backend of a device."""

    def name(self) -> str:
        return BACKEND


class EmulatedGroup(dist.ProcessGroup):
    """Rank 0 of `size`. delay_us: of a collective, as `graphshard.cost.comm` counts its bytes."""

    def __init__(
        self, size: int, device: torch.device, delay_us: Callable[[CollectiveKind, int], float]
    ) -> None:
        super().__init__(0, size)
        self._delay_us, self._ranks = delay_us, size
        self._name = ""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cycles_per_us = 0.0 if self._stream is None else cycles_per_us()

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Named:
        return Named()

    def _occupy(
        self, kind: CollectiveKind, outputs: list[Tensor], inputs: list[Tensor], whole: list[Tensor]
    ) -> Occupied:
        """The collective: first its time, then what it writes."""
        delay_us = self._delay_us(kind, sum(tensor.nbytes for tensor in whole))
        if self._stream is None:
            self._write(kind, outputs, inputs)
            return Occupied(None, ())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(delay_us * self._cycles_per_us))
            self._write(kind, outputs, inputs)
            done = torch.cuda.Event()
            done.record()
        return Occupied(done, [*outputs, *inputs])

    def _write(self, kind: CollectiveKind, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        for output, own in zip(outputs, inputs, strict=True):
            if kind is CollectiveKind.ALL_GATHER:
                first, rest = output.view(self._ranks, -1).split([1, self._ranks - 1])
                if first.data_ptr() != own.data_ptr():  # it may stand there already
                    first.copy_(own.view(1, -1))
                rest.copy_(own.view(1, -1))
            elif kind is CollectiveKind.REDUCE_SCATTER:
                output.view(-1).copy_(own.view(self._ranks, -1)[0])

    # -- what c10d calls, by its names in torch 2.11 and in later ones -------------------------

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Occupied:
        return self._occupy(CollectiveKind.ALL_GATHER, outputs, inputs, outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Occupied:
        return self._occupy(CollectiveKind.REDUCE_SCATTER, outputs, inputs, inputs)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Occupied:
        return self.allgather_into_tensor_coalesced([output], [own])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Occupied:
        return self.reduce_scatter_tensor_coalesced([output], [whole])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Occupied:
        return self._occupy(CollectiveKind.ALL_REDUCE, [], [], tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Occupied:
        return self._occupy(CollectiveKind.BROADCAST, [], [], tensors)

    def barrier(self, options: Any = None) -> Occupied:
        return Occupied(None, ())


def cycles_per_us() -> float:
    """How many cycles `torch.cuda._sleep` spins in a microsecond on the current device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)  # the first launch loads the kernel
    begin.record()
    torch.cuda._sleep(SPIN_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return SPIN_CYCLES / (1e3 * begin.elapsed_time(end))


def join(machine: Machine, ranks: int, ranks_per_node: int, device: torch.device) -> None:
    """Make this process rank 0 of `ranks`, once per process."""
    group = RankGroup(ranks, min(ranks, ranks_per_node))

    def delay_us(kind: CollectiveKind, size_bytes: int) -> float:
        return float(collective_us(machine, kind, group, size_bytes))

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> EmulatedGroup:
        return EmulatedGroup(size, device, delay_us)

    dist.Backend.register_backend(BACKEND, create, devices=[device.type])
    dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())
