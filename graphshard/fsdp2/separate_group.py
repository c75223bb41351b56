"""Reductions on a process group of their own, as by FSDP2's `set_separate_reduce_scatter_group`.

In: a group of which a plan says so, on all its ranks alike. Afterwards FSDP2 reduces there, eager
or compiled.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from graphshard.fsdp2 import versions
from graphshard.fsdp2.backends import backend_name
from graphshard.fsdp2.group import FsdpGroup


def may_reduce_apart(group: FsdpGroup) -> bool:
    """The user left reductions where FSDP2 puts them, and this torch can move them."""
    shared = group.reduce_process_group is group.gather_process_group
    return versions.MAY_REDUCE_APART and group.world_size > 1 and shared and group.reduces_plainly


def reduce_apart(group: FsdpGroup, made: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
    """Give the reductions of `group` a process group of their own.

    made: those that exist already, by rank; a new one is added. All ranks of the group call this.
    """
    shared = group.gather_process_group
    if shared is None or not may_reduce_apart(group):
        return
    ranks = tuple(dist.get_process_group_ranks(shared))
    if ranks not in made:
        made[ranks] = dist.new_group(
            list(ranks),
            use_local_synchronization=True,
            pg_options=_options(backend_name(shared, group.device)),
            group_desc="graphshard_reduce_scatter",
        )
    group.raw._set_separate_reduce_scatter_group(True, made)


def _options(backend: str | None) -> Any:
    """NCCL's kernels get a stream before which compute has to stand back."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
