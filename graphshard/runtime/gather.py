"""All-gather of one group: issue, wait (copy out), release.

Bytes on the wire and their order are FSDP2's: each rank's padded shards, cast to the gather
dtypes, in registration order, in one bucket.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import FsdpParam
from graphshard.runtime.live import Held, LiveGroup


class Gather:
    """One gathered use of a group, from issue to release.

    `_flats` are the gathered parameters with FSDP2's padding, one-dimensional; what compute sees
    are views of them.
    """

    __slots__ = (
        "_bucket",
        "_dtypes",
        "_flats",
        "_live",
        "_ranks",
        "_versions",
        "_widths",
        "work",
    )

    def __init__(self, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        self._live = live
        self._dtypes = dtypes
        self.work: dist.Work | None = None
        self._bucket: Tensor | None = None
        self._versions = live.versions()
        taken = live.fsdp.take_unsharded()
        held = live.fresh(dtypes)
        if taken is not None:
            self._flats: list[Tensor] | None = cast(taken, dtypes)
        elif held is not None and held.part_of is None:
            self._flats = held.flats
        else:
            self._flats = None
            with record_function(f"graphshard::all_gather {live.fqn}"):
                self._issue(held)
        live.held = None

    def _issue(self, held: Held | None) -> None:
        fsdp = self._live.fsdp
        fsdp.wait_for_optimizer()
        if held is not None:
            parts, group = held.flats, held.part_of
        else:
            parts, group = self._live.shards(), fsdp.gather_process_group
        if group is None or group.size() == 1:
            self._flats = self._memory([p.numel() for p in parts])
            torch._foreach_copy_(self._flats, parts)
            return
        self._widths, self._ranks = [p.numel() for p in parts], group.size()
        self._bucket, own = _bucket(parts, self._dtypes, group, fsdp.gather_comm)
        self.work = all_gather(self._bucket, own, group, fsdp.gather_comm)
        self._live.counters.all_gathers += 1

    def wait(self) -> list[Tensor]:
        """The gathered parameters in registration order, each of its unsharded size."""
        if self._flats is None:
            if self._bucket is None:
                raise RuntimeStateError("GS403", f"{self._live.fqn} was used after its release")
            with record_function(f"graphshard::all_gather_wait {self._live.fqn}"):
                self.drain()
                self._flats = self._memory([w * self._ranks for w in self._widths])
                _copy_out(self._bucket, self._flats, self._ranks)
            # The backend's thread may hold the tensor a little longer: free its memory now.
            self._bucket.untyped_storage().resize_(0)
            self._bucket = None
        world = self._live.fsdp.world_size
        pairs = zip(self._flats, self._live.fsdp.params, strict=True)
        return [_unsharded(flat, param, world) for flat, param in pairs]

    def release(self, *, keep: bool) -> None:
        """Give the memory back, or keep it for a later gather of the same shards."""
        flats, self._flats = self._taken(), None
        live = self._live
        live.held = Held(flats, self._dtypes, self._versions) if keep else None
        if live.fsdp.keeps_storage:
            live.storage = list(flats)
        if not keep:
            free(flats)

    def release_to(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of each parameter, spread over the smaller `group`."""
        flats, self._flats = self._taken(), None
        parts = [f.chunk(group.size())[group.rank()].clone() for f in flats]
        self._live.held = Held(parts, self._dtypes, self._versions, part_of=group)
        free(flats)

    def fits(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Still what a gather of these dtypes would fetch now."""
        return dtypes == self._dtypes and self._versions == self._live.versions()

    def _taken(self) -> list[Tensor]:
        if self._flats is None:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was released before its wait")
        return self._flats

    def _memory(self, numels: list[int]) -> list[Tensor]:
        """Where the parameters go: new memory, or that of the last time if FSDP2 keeps it."""
        kept, self._live.storage = self._live.storage, None
        if kept is not None and [(k.numel(), k.dtype) for k in kept] == list(
            zip(numels, self._dtypes, strict=True)
        ):
            return kept
        device = self._live.fsdp.device
        pairs = zip(numels, self._dtypes, strict=True)
        return [torch.empty(n, dtype=d, device=device) for n, d in pairs]

    def drain(self) -> None:
        """Wait for the collective, if any; its result may be thrown away."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def prefetch(live: LiveGroup) -> None:
    """Issue the all-gather of a group that some later run will ask for."""
    if live.prefetched is None:
        live.prefetched = Gather(live, live.dtypes)


def take_prefetched(live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> Gather:
    """A gather of these dtypes: the prefetched one if it fits, else a new one."""
    live.dtypes = dtypes
    ahead, live.prefetched = live.prefetched, None
    if ahead is None:
        return Gather(live, dtypes)
    if ahead.fits(dtypes):
        return ahead  # type: ignore[no-any-return]
    ahead.drain()
    return Gather(live, dtypes)


def all_gather(
    bucket: Tensor, own: Tensor, group: dist.ProcessGroup, comm: Any
) -> dist.Work | None:
    """Asynchronous all-gather of `own` (a view into `bucket`) into `bucket` by FSDP2's `comm`."""
    work = comm(output_tensor=bucket, input_tensor=own, group=group, async_op=True)
    return work  # type: ignore[no-any-return]


def free(flats: list[Tensor]) -> None:
    """End of life of gathered memory: dropping the references frees it."""
    flats.clear()


def cast(parts: list[Tensor], dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    return [p.to(d) for p, d in zip(parts, dtypes, strict=True)]


def _bucket(
    parts: list[Tensor], dtypes: tuple[torch.dtype, ...], group: dist.ProcessGroup, comm: Any
) -> tuple[Tensor, Tensor]:
    """Output of the all-gather and this rank's filled part of it.

    Parameters of different dtypes travel as bytes, as in FSDP2.
    """
    uniform = len(set(dtypes)) == 1
    wire = dtypes[0] if uniform else torch.uint8
    if not uniform:
        parts = [p.view(torch.uint8) for p in cast(parts, dtypes)]
    numels = [p.numel() for p in parts]
    total = sum(numels)
    bucket = comm.allocate((total * group.size(),), dtype=wire, device=parts[0].device)
    own = bucket.narrow(0, total * group.rank(), total)
    torch._foreach_copy_(list(own.split(numels)), parts)
    return bucket, own


def _copy_out(bucket: Tensor, flats: list[Tensor], ranks: int) -> None:
    """From rank-major (the wire) to parameter-major (what compute sees)."""
    out = [f.view(ranks, -1) for f in flats]
    if bucket.dtype == torch.uint8:
        out = [o.view(torch.uint8) for o in out]
    columns = [o.shape[1] for o in out]
    torch.split_with_sizes_copy(bucket.view(ranks, -1), columns, dim=1, out=out)


def _unsharded(flat: Tensor, param: FsdpParam, world: int) -> Tensor:
    size, dim = param.size, param.shard_dim
    if dim == 0:
        return flat[: math.prod(size)].view(size)
    ranks = flat.view(world, *param.padded_shard_size).unbind(0)
    return torch.cat(ranks, dim=dim)
