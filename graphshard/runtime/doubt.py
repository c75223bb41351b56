"""Whether gathered values that a forward finds here are still those of the shards.

In: groups that were gathered before this forward began: by an optimizer step (`overlap_optimizer`),
by an evaluation after which the user wants them to stay, or because the plan keeps them between
micro-steps. Afterwards what is left of it has, on all ranks,
the bytes that a gather of now would fetch.

Version counters do not tell: a write through `.data`, `_foreach_*` on it, `.numpy()` or
`to_local().data` counts nothing. So this rank's bytes are compared with those that were sent. And
one rank alone may see a change (weights are clipped, and only its own were too large), while all
have to gather again together. So the ranks exchange one flag for each group, in one small
all-reduce for each process group.

What is kept from a forward for its own backward is not asked about: who changes a shard between
the two without a count has to call `reshard()`, as with FSDP2's `reshard_after_forward=False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.runtime.gather_buffers import GatherBuffer
from graphshard.runtime.issued import note
from graphshard.runtime.live import KeptParams, LiveGroup
from graphshard.runtime.waiting import NamedCollective, finish


def drop_stale(lives: Sequence[LiveGroup]) -> None:
    """Forget what was gathered of shards that have changed since, on some rank.

    lives: the groups of a forward that has taken none of them yet. On all ranks alike: whether
    something was kept or sent ahead is the same on them.
    """
    by_process_group: dict[dist.ProcessGroup, list[LiveGroup]] = {}
    for live in lives:
        if live.kept is not None and live.kept.to_check and _cannot_compare(live, live.kept):
            live.let_go()
        if is_doubtful(live) and (group := live.fsdp.gather_process_group) is not None:
            by_process_group.setdefault(group, []).append(live)
    for group, found in by_process_group.items():
        for live, changed in zip(found, _flags(group, found), strict=True):
            if changed:
                _forget(live)
            _settle(live)


def _cannot_compare(live: LiveGroup, kept: KeptParams) -> bool:
    """A node's shard has no bytes of this rank; with extensions a gather sends what depends on
    more than the shards."""
    return bool(kept.parts) or live.fsdp.has_extensions


def is_doubtful(live: LiveGroup) -> bool:
    """It has something that was gathered before, and that FSDP2 would gather now."""
    is_ahead = live.prefetched is not None and bool(live.prefetched.sent_bytes)
    return is_ahead or (live.kept is not None and live.kept.to_check)


def _flags(group: dist.ProcessGroup, lives: Sequence[LiveGroup]) -> list[int]:
    """For each group, whether its shards have changed on some rank."""
    flags = torch.tensor([_has_changed(live) for live in lives], dtype=torch.int32)
    flags = flags.to(lives[0].fsdp.device)
    names = [live.fqn for live in lives]
    note(lives[0], ("comparison", *names), lambda: f"comparison of the shards of {names}")
    work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True)
    finish(work, NamedCollective("comparison of shards", lives[0], lambda: names, group))
    return flags.tolist()


def _has_changed(live: LiveGroup) -> bool:
    ahead, kept, shards = live.prefetched, live.kept, live.shards()
    if ahead is not None:
        pairs: Iterable[tuple[Tensor, Tensor]] = (
            (before, shards[i]) for i, before in ahead.sent_bytes.items()
        )
        return not ahead.fits(live.dtypes) or not all(_are_same_bytes(a, b) for a, b in pairs)
    assert kept is not None
    rank = dist.get_rank(live.fsdp.gather_process_group)
    return kept.versions != live.fsdp.versions() or not all(
        _are_same_bytes(row, shards[i].to(row))
        for buffer in kept.buffers
        for i, row in _own_rows(buffer, rank)
    )


def _own_rows(buffer: GatherBuffer, rank: int) -> Iterable[tuple[int, Tensor]]:
    """This rank's part of each parameter, as it was gathered."""
    return zip(buffer.layout.indices, (rows[rank] for rows in buffer.rows), strict=True)


def _are_same_bytes(a: Tensor, b: Tensor) -> bool:
    """Also where they are no numbers, and for the sign of zero."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _forget(live: LiveGroup) -> None:
    if live.prefetched is not None:
        live.prefetched.drop()
        live.prefetched = None
    live.let_go()


def _settle(live: LiveGroup) -> None:
    """What is left is certain: this forward does not ask again."""
    if live.prefetched is not None:
        live.prefetched.sent_bytes = {}
    if live.kept is not None:
        live.kept = live.kept.certain()
