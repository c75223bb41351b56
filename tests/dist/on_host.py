"""A CPU that has a host: what `CPUOffloadPolicy` keeps there travels, slowly."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patching import patched
from torch.distributed.fsdp import CPUOffloadPolicy

from graphshard.fsdp2 import cpu_offload
from graphshard.runtime import host_copies

SLOW_S = 0.002


def _slow(original: Any) -> Any:
    def copied(queue: Any, pairs: Any) -> None:
        for target, _ in pairs:
            target.fill_(float("nan"))  # whoever reads too early sees it
        time.sleep(SLOW_S)
        original(queue, pairs)

    return copied


@contextmanager
def as_if_apart() -> Iterator[None]:
    """The memory of a CPU counts as the host's, and as that of a device beside it.

    Gradients go from one to the other in a thread, as on a GPU in a stream; shards are read where
    they are. For models that are sharded and compiled within.
    """
    apart = patched(cpu_offload, "has_own_memory", lambda original: lambda device: True)
    with apart, patched(host_copies.ThreadQueue, "_copy", _slow):
        yield


def policy(device_type: str) -> CPUOffloadPolicy:
    """A machine without an accelerator has no pinned memory."""
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")
