"""What the ranks of a mesh tell each other through the job's store: text, no collective."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from graphshard.fsdp2.group import FsdpGroup


def ranks_of(groups: Sequence[FsdpGroup]) -> tuple[int, ...]:
    """Global ranks over which any of `groups` is sharded or replicated, in rising order."""
    meshes = [group.raw.mesh_info.mesh for group in groups]
    return tuple(sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


def exchange(key: str, text: str, ranks: Sequence[int], timeout: timedelta) -> list[str]:
    """What every one of `ranks` gave under `key`, in their order; all of them call it.

    Raises DistStoreError if one does not within `timeout`.
    """
    store = PrefixStore("graphshard", distributed_c10d._get_default_store())
    names = {rank: f"{key}/{rank}" for rank in ranks}
    store.set(names[dist.get_rank()], text)
    store.wait(list(names.values()), timeout)
    return [store.get(name).decode() for name in names.values()]
