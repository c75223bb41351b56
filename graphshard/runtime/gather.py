"""All-gathers: what travels in one collective, and what a group has of it until its release.

A `Bucket` is one collective: whole groups, or some parameters of one. A `Gather` is one gathered
use of a group, from its first issue to its release. `issue` puts what gathers still miss into
buckets. Bytes on the wire and their order are FSDP2's: each rank's padded shards, cast to the
gather dtypes, in registration order, group after group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import FsdpParam
from graphshard.runtime.live import Held, LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.waiting import finish
from graphshard.schedule import StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What one group puts into a bucket: this rank's parts of its parameters `indices`."""

    live: LiveGroup
    indices: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    parts: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The group's FQN, with the parameters' places if not all of them travel."""
        whole = len(self.indices) == len(self.live.fsdp.params)
        return self.live.fqn if whole else f"{self.live.fqn} {list(self.indices)}"


class Bucket:
    """One all-gather over several ranks, from its issue until everything is copied out."""

    __slots__ = ("_buffer", "_flats", "_live", "_names", "_places", "_ranks", "work")

    def __init__(self, loads: Sequence[Load], group: dist.ProcessGroup) -> None:
        first = loads[0].live
        comm = first.fsdp.gather_comm
        self._names = [load.name for load in loads]
        self._ranks = group.size()
        self._flats: dict[tuple[LiveGroup, int], Tensor] = {}
        # Sizes only: what the parts are views of may be freed while the collective runs.
        self._places = [
            (load.live, index, part.numel() * self._ranks, dtype)
            for load in loads
            for index, part, dtype in zip(load.indices, load.parts, load.dtypes, strict=True)
        ]
        parts = [part for load in loads for part in load.parts]
        dtypes = tuple(dtype for load in loads for dtype in load.dtypes)
        with step_range(StepKind.GATHER_ISSUE, *self._names):
            buffer, own = _bucket(parts, dtypes, group, comm)
            self.work = all_gather(buffer, own, group, comm)
        self._buffer: Tensor | None = buffer
        self._live = first
        first.counters.all_gathers += 1

    def take(self, live: LiveGroup, index: int) -> Tensor:
        """A gathered parameter, one-dimensional. The first call waits and copies all of them."""
        if self._buffer is not None:
            with step_range(StepKind.GATHER_WAIT, *self._names):
                self.drain()
                flats = [memory(*place) for place in self._places]
                _copy_out(self._buffer, flats, self._ranks)
            keys = (place[:2] for place in self._places)
            self._flats = dict(zip(keys, flats, strict=True))
            self._free()
        return self._flats.pop((live, index))

    def drain(self) -> None:
        """Wait for the collective, if it is not done."""
        if self.work is not None:
            finish(self.work, self._live)
            self.work = None

    def drop(self) -> None:
        """Wait for the collective and throw its result away."""
        self.drain()
        self._free()

    def _free(self) -> None:
        if self._buffer is not None:
            # The backend's thread may hold the tensor a little longer: free its memory now.
            self._buffer.untyped_storage().resize_(0)
            self._buffer = None


class Gather:
    """One gathered use of a group, from its first issue to its release.

    `_flats` are the parameters that are here, by index, with FSDP2's padding, one-dimensional; what
    compute sees are views of them. What is in `_under_way` is waited for; the rest is missing.
    """

    __slots__ = ("_dtypes", "_flats", "_live", "_spread", "_under_way", "_versions")

    def __init__(self, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        self._live = live
        self._dtypes = dtypes
        self._versions = live.versions()
        self._under_way: dict[int, Bucket] = {}
        self._spread: Held | None = None
        here: list[Tensor] = []
        taken, held = live.fsdp.take_unsharded(), live.fresh(dtypes)
        if taken is not None:
            here = cast(taken, dtypes)
        elif held is not None and held.part_of is None:
            here = held.flats
        else:
            self._spread = held
        self._flats: dict[int, Tensor] | None = dict(enumerate(here))
        live.held = None

    @property
    def route(self) -> tuple[dist.ProcessGroup | None, object]:
        """Process group, and whose collective it is: what is equal may share a bucket."""
        fsdp = self._live.fsdp
        group = fsdp.gather_process_group if self._spread is None else self._spread.part_of
        return group, fsdp.gather_comm_kind

    def load(self, indices: Iterable[int]) -> Load | None:
        """What of parameters `indices` has still to travel; None if nothing has."""
        here = self._here()
        missing = tuple(i for i in indices if i not in here and i not in self._under_way)
        if not missing:
            return None
        self._live.fsdp.wait_for_optimizer()
        source = self._live.shards() if self._spread is None else self._spread.flats
        dtypes = tuple(self._dtypes[i] for i in missing)
        return Load(self._live, missing, dtypes, tuple(source[i] for i in missing))

    def sent(self, load: Load, bucket: Bucket | None) -> None:
        """`load` travels in `bucket`; None: this rank has all of it, so that a copy is enough."""
        if bucket is not None:
            self._under_way.update(dict.fromkeys(load.indices, bucket))
        else:
            places = zip(load.indices, load.parts, load.dtypes, strict=True)
            flats = [memory(self._live, i, p.numel(), d) for i, p, d in places]
            torch._foreach_copy_(flats, list(load.parts))
            self._here().update(zip(load.indices, flats, strict=True))
        if len(self._here()) + len(self._under_way) == len(self._dtypes):
            self._spread = None

    def wait(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Parameters `indices`, gathered, each of its unsharded size."""
        here, fsdp = self._here(), self._live.fsdp
        for index in indices:
            if index in self._under_way:
                here[index] = self._under_way[index].take(self._live, index)
                del self._under_way[index]
        return {i: _unsharded(here[i], fsdp.params[i], fsdp.world_size) for i in indices}

    def release(self, *, keep: bool) -> None:
        """Give the memory back, or keep it for a later gather of the same shards."""
        flats, live = self._taken(), self._live
        live.held = Held(flats, self._dtypes, self._versions) if keep else None
        if live.fsdp.keeps_storage:
            live.storage = dict(enumerate(flats))
        if not keep:
            free(flats)

    def release_to(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of each parameter, spread over the smaller `group`."""
        flats = self._taken()
        parts = [f.chunk(group.size())[group.rank()].clone() for f in flats]
        self._live.held = Held(parts, self._dtypes, self._versions, part_of=group)
        free(flats)

    def fits(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Still what a gather of these dtypes would fetch now."""
        return dtypes == self._dtypes and self._versions == self._live.versions()

    def drain(self) -> None:
        """Wait for what is under way and throw it away."""
        for bucket in self._under_way.values():
            bucket.drop()

    def _here(self) -> dict[int, Tensor]:
        if self._flats is None:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was used after its release")
        return self._flats

    def _taken(self) -> list[Tensor]:
        """All parameters, in registration order; this gather has none afterwards."""
        here = self._here()
        if len(here) < len(self._dtypes):
            raise RuntimeStateError("GS403", f"{self._live.fqn} was released before its wait")
        self._flats = None
        return [here[index] for index in range(len(here))]


def issue(wanted: Iterable[tuple[Gather, Iterable[int]]]) -> list[Bucket]:
    """Start what is missing of each gather's parameters; what goes the same way goes together.

    Returns the collectives that were issued, in order.

    All ranks issue the same: what leaves a group out (settings, meshes, calls of `unshard()`,
    whether shards were written to) is the same on all of them, as eager FSDP2 needs it, too.
    """
    lots: dict[tuple[dist.ProcessGroup | None, object], list[tuple[Gather, Load]]] = {}
    for gather, indices in wanted:
        load = gather.load(indices)
        if load is not None:
            lots.setdefault(gather.route, []).append((gather, load))
    issued: list[Bucket] = []
    for (group, _), lot in lots.items():
        bucket = None
        if group is not None and group.size() > 1:
            bucket = Bucket([load for _, load in lot], group)
            issued.append(bucket)
        for gather, load in lot:
            gather.sent(load, bucket)
    return issued


def prefetch(live: LiveGroup) -> None:
    """Issue the all-gather of a group that some later run will ask for."""
    if live.prefetched is None:
        live.prefetched = Gather(live, live.dtypes)
        issue([(live.prefetched, range(len(live.dtypes)))])


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


def memory(live: LiveGroup, index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Where a parameter goes: new memory, or that of the last time if FSDP2 keeps it."""
    kept = live.storage.pop(index, None)
    if kept is not None and (kept.numel(), kept.dtype) == (numel, dtype):
        return kept
    return torch.empty(numel, dtype=dtype, device=live.fsdp.device)


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
        parts = [p.to(d).view(torch.uint8) for p, d in zip(parts, dtypes, strict=True)]
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
