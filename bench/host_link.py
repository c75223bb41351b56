"""A host beside the emulated device, reached over a link on the emulated network's clock.

In: the network, whose clock it is, and the rate of the link, each way. Afterwards the copies of
`graphshard.runtime.host_copies` are real, and take what that link takes; what the host holds is
memory that torch's profiler does not see, as that of a GPU's host is none of the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from graphshard.runtime import host_copies
from graphshard.runtime.host_copies import Done, ThreadQueue

BYTES_PER_US_OF_ONE_GB_S = 1e3
ALPHA_US = 10.0


class HostLink:
    """waited_us: how long compute stood still for copies."""

    def __init__(self, network: Any, gb_s: float) -> None:
        self.network = network
        self.bytes_per_us = gb_s * BYTES_PER_US_OF_ONE_GB_S
        self.waited_us = 0.0


class EmulatedQueue:
    """One way of the link. The copies themselves run in a thread, whose time is not the clock's."""

    def __init__(self, link: HostLink) -> None:
        self._link, self._thread = link, ThreadQueue()
        self._free_at_us = 0.0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Done:
        took_us = ALPHA_US + sum(target.nbytes for target, _ in pairs) / self._link.bytes_per_us
        self._free_at_us = max(self._link.network.now_us(), self._free_at_us) + took_us
        return _Emulated(self._link, self._thread.copy(pairs), self._free_at_us)


class _Emulated:
    def __init__(self, link: HostLink, real: Done, end_us: float) -> None:
        self._link, self._real, self._end_us = link, real, end_us

    def wait(self) -> None:
        self._real.wait()
        behind_us = max(0.0, self._end_us - self._link.network.now_us())
        self._link.network.compute_us(behind_us)
        self._link.waited_us += behind_us

    def get_future(self) -> Future[None]:
        raise RuntimeError("its end is the clock's, not the thread's")

    def drop(self) -> None:
        self._real.drop()


def connect(network: Any, gb_s: float) -> HostLink:
    """From now on, in this process."""
    link = HostLink(network, gb_s)
    vars(host_copies)["queue_of"] = cache(lambda device, issue: EmulatedQueue(link))
    vars(host_copies)["host_memory"] = host_memory
    return link


def host_memory(tensor: Tensor) -> Tensor:
    """NumPy's."""
    raw = torch.from_numpy(numpy.empty(max(1, tensor.nbytes), numpy.uint8))
    return raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
