"""All-gather of one group: issue, wait (copy out), release.

Bytes on the wire and their order are FSDP2's: each rank's padded shards, cast to the gather
dtypes, in registration order, in one bucket.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import FsdpParam
from graphshard.runtime.live import Held, LiveGroup


class Gather:
    """One gathered use of a group, from issue to release."""

    __slots__ = ("_bucket", "_dtypes", "_live", "_tensors", "_versions", "_work")

    def __init__(self, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        self._live = live
        self._dtypes = dtypes
        self._work: dist.Work | None = None
        self._bucket: Tensor | None = None
        self._tensors: list[Tensor] | None = None
        if (held := live.fresh(dtypes)) is not None:
            self._tensors, self._versions = held.tensors, held.versions
            return
        live.held = None
        with record_function(f"graphshard::all_gather {live.fqn}"):
            self._issue()

    def _issue(self) -> None:
        self._versions = self._live.versions()
        shards = self._live.shards()
        fsdp = self._live.fsdp
        if fsdp.world_size == 1:
            self._tensors = _copy_single_rank(self._live, shards, self._dtypes)
            return
        group = fsdp.gather_process_group
        self._bucket, own = _bucket(shards, self._dtypes, group)
        self._work = all_gather(self._bucket, own, group)
        self._live.counters.all_gathers += 1

    def wait(self) -> list[Tensor]:
        """The gathered parameters in registration order, each of its unsharded size."""
        if self._tensors is None:
            if self._bucket is None:
                raise RuntimeStateError("GS403", f"{self._live.fqn} was used after its release")
            with record_function(f"graphshard::all_gather_wait {self._live.fqn}"):
                self.drain()
                self._tensors = _copy_out(self._live, self._bucket, self._dtypes)
            # The backend's thread may hold the tensor a little longer: free its memory now.
            self._bucket.untyped_storage().resize_(0)
            self._bucket = None
        return self._tensors

    def release(self, *, keep: bool) -> None:
        """Give the memory back, or keep it for a later gather of the same shards."""
        if self._tensors is None:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was released before its wait")
        self._live.held = Held(self._tensors, self._dtypes, self._versions) if keep else None
        tensors, self._tensors = self._tensors, None
        if not keep:
            free(tensors)

    def drain(self) -> None:
        """Wait for the collective, if any; its result may be thrown away."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def all_gather(bucket: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Asynchronous c10d all-gather of `own` (a view into `bucket`) into `bucket`."""
    issue = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
    return issue(bucket, own, group=group, async_op=True)  # type: ignore[no-any-return]


def free(tensors: list[Tensor]) -> None:
    """End of life of gathered buffers: dropping the references frees them."""
    tensors.clear()


def _bucket(
    shards: list[Tensor], dtypes: tuple[torch.dtype, ...], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Output of the all-gather and this rank's filled part of it.

    Parameters of different dtypes travel as bytes, as in FSDP2.
    """
    uniform = len(set(dtypes)) == 1
    wire = dtypes[0] if uniform else torch.uint8
    if not uniform:
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    numels = [s.numel() for s in shards]
    total = sum(numels)
    bucket = torch.empty(total * group.size(), dtype=wire, device=shards[0].device)
    own = bucket.narrow(0, total * group.rank(), total)
    torch._foreach_copy_(list(own.split(numels)), shards)
    return bucket, own


def _copy_out(live: LiveGroup, bucket: Tensor, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """From rank-major (the wire) to parameter-major (what compute sees)."""
    world, params = live.fsdp.world_size, live.fsdp.params
    numels = [math.prod(p.padded_shard_size) for p in params]
    flats = [
        torch.empty(world * n, dtype=dtype, device=bucket.device)
        for n, dtype in zip(numels, dtypes, strict=True)
    ]
    out = [f.view(world, -1) for f in flats]
    if bucket.dtype == torch.uint8:
        out = [o.view(torch.uint8) for o in out]
    widths = [o.shape[1] for o in out]
    torch.split_with_sizes_copy(bucket.view(world, -1), widths, dim=1, out=out)
    return [_unsharded(f, p, world) for f, p in zip(flats, params, strict=True)]


def _unsharded(flat: Tensor, param: FsdpParam, world: int) -> Tensor:
    size, dim = param.size, param.shard_dim
    if dim == 0:
        return flat[: math.prod(size)].view(size)
    ranks = flat.view(world, *param.padded_shard_size).unbind(0)
    return torch.cat(ranks, dim=dim)


def _copy_single_rank(
    live: LiveGroup, shards: list[Tensor], dtypes: tuple[torch.dtype, ...]
) -> list[Tensor]:
    """On one rank there is nothing to gather; a copy keeps later writes to the shard apart."""
    return [
        shard.to(dtype, copy=True)[: math.prod(p.size)].view(p.size)
        for shard, dtype, p in zip(shards, dtypes, live.fsdp.params, strict=True)
    ]
