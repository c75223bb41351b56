"""Copies to the host and back, beside compute: of activations, and of what `CPUOffloadPolicy` keeps
there.

In come tensors of the device; out come tensors of the host that hold the same, and the other way
round. Each way has a queue of its own for each device: a stream, or on the CPU a thread, where the
host is the device and the copies are real all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from graphshard.runtime.ranges import step_range
from graphshard.runtime.stopwatch import Work
from graphshard.schedule.steps import StepKind


class Way(Enum):
    TO_HOST = auto()
    TO_DEVICE = auto()


class Done(Protocol):
    """A copy that is under way; a stopwatch takes it for `dist.Work`."""

    def wait(self) -> None:
        """What is computed from now on finds it done. Raises what the copy raised."""

    def get_future(self) -> Future[None]:
        """Done when the copy is. Raises RuntimeError where that is no event of the host's."""

    def synchronize(self) -> None:
        """Returns when it is done: the host reads what was copied."""

    def drop(self) -> None:
        """Nobody needs it; but what is computed from now on may be given its memory."""


class CopyQueue(Protocol):
    """Copies one after the other."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Done:
        """Start to copy the second of each pair, as it will be when what was computed so far is
        done, to the first."""

    def beside(self) -> AbstractContextManager[None]:
        """What is done within it follows what was computed and copied so far, and compute does not
        wait for it."""

    def so_far(self) -> Done:
        """All that was started on this queue."""


class StreamQueue:
    """On a stream of the device. The caller holds all tensors until it has waited."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Done:
        with self.beside():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.so_far()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Memory that is taken within may be given back while compute still reads it: whoever is
        given it next waits for compute first, as this does."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def so_far(self) -> Done:
        return _Recorded(self._stream.record_event())


class _Recorded:
    """wait: on the stream that is the current one where it is called."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait()

    def get_future(self) -> Future[None]:
        raise RuntimeError("the device knows when it is done")

    def synchronize(self) -> None:
        self._event.synchronize()

    drop = wait


class ThreadQueue:
    """On a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="graphshard-copies")

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Done:
        return _Awaited(self._thread.submit(self._copy, tuple(pairs)))

    def beside(self) -> AbstractContextManager[None]:
        """On the thread of the caller: what is the host's can be read where it is."""
        return nullcontext()

    def so_far(self) -> Done:
        return _Awaited(self._thread.submit(lambda: None))

    def _copy(self, pairs: tuple[tuple[Tensor, Tensor], ...]) -> None:
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)


class _Awaited:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def get_future(self) -> Future[None]:
        return self._future

    synchronize = wait

    def drop(self) -> None:
        """The thread holds the memory for as long as it needs it."""


@cache
def queue_of(device: torch.device, way: Way) -> CopyQueue:
    """One in a process for each way."""
    return ThreadQueue() if device.type == "cpu" else StreamQueue(device)


class HostCopy:
    """One copy of several tensors, from its issue until its wait.

    work: what is waited for, the copy or what times it.
    """

    __slots__ = ("_done", "_sources", "_targets", "work")

    def __init__(self, done: Done, targets: list[Tensor], sources: Sequence[Tensor]) -> None:
        self._done, self._targets, self._sources = done, targets, sources
        self.work: Work = done

    @property
    def targets(self) -> Sequence[Tensor]:
        """What the copy fills; to be read when it is done."""
        return self._targets

    def synchronize(self) -> None:
        """Returns when the host may read the targets. The memory that was copied from is free."""
        self._done.synchronize()
        self._sources = ()

    def wait(self) -> list[Tensor]:
        """What was copied. The memory that it was copied from is free."""
        self.work.wait()
        targets, self._targets, self._sources = self._targets, [], ()
        return targets

    def drop(self) -> None:
        """The run has failed: neither may be given to anybody before the copy is done."""
        self._done.drop()
        self._targets, self._sources = [], ()


def offload(
    device: torch.device, tensors: Sequence[Tensor], name: str, *, pins: bool = True
) -> HostCopy:
    """Start to copy activations of group `name`, or its reduced gradients, to the host. They have
    no gaps; the copies have their strides. pins: to pinned memory."""
    on_host = partial(host_memory, pins=pins)
    return _started(device, Way.TO_HOST, StepKind.OFFLOAD_ISSUE, name, tensors, on_host)


def host_memory(tensor: Tensor, *, pins: bool) -> Tensor:
    """Memory of the host for a copy of `tensor`; pinned, unless the host is its device."""
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
    pin_memory = pins and tensor.device.type != "cpu"
    return torch.empty_strided(size, stride, dtype=dtype, pin_memory=pin_memory)


def reload(device: torch.device, tensors: Sequence[Tensor], name: str) -> HostCopy:
    """Start to copy what the host holds back. It stays there for another backward."""

    def on_device(tensor: Tensor) -> Tensor:
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return _started(device, Way.TO_DEVICE, StepKind.RELOAD_ISSUE, name, tensors, on_device)


def _started(
    device: torch.device,
    way: Way,
    issue: StepKind,
    name: str,
    sources: Sequence[Tensor],
    target_of: Callable[[Tensor], Tensor],
) -> HostCopy:
    with step_range(issue, lambda: [name]):
        targets = [target_of(source) for source in sources]
        done = queue_of(device, way).copy(list(zip(targets, sources, strict=True)))
    return HostCopy(done, targets, sources)
