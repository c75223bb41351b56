"""Ranks that are threads of one process: PyTorch's `MultiThreadedTestCase`."""

from __future__ import annotations

import torch.distributed as dist

THREADED = "threaded"


def ranks_are_threads(*groups: dist.ProcessGroup | None) -> bool:
    """Then no rank can wait for the others' plan: Dynamo compiles in one thread at a time."""
    return any(dist.get_backend(group) == THREADED for group in groups if group is not None)
