"""All-gathers: what travels in one collective, and what a group has of it until its release.

A `Bucket` is one collective: whole groups, or some parameters of one. A `Gather` is one gathered
use of a group, from its first issue to its release. `issue` puts what gathers still miss into
buckets. Bytes on the wire and their order are FSDP2's: each rank's padded shards, cast to the
gather dtypes, in registration order, group after group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.errors import RuntimeStateError
from graphshard.runtime.live import Held, LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.rooms import Layout, Room, give_back, layout_of, parameters, room_for
from graphshard.runtime.waiting import finish
from graphshard.schedule import StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What one group puts into a bucket: this rank's parts of the parameters of `layout`."""

    live: LiveGroup
    layout: Layout
    parts: Sequence[Tensor]


class Bucket:
    """One all-gather over several ranks, from its issue until everything is copied out."""

    __slots__ = ("_buffer", "_places", "_rooms", "work")

    def __init__(self, loads: Sequence[Load], group: dist.ProcessGroup) -> None:
        first = loads[0].live
        comm = first.fsdp.gather_comm
        # Not the parts: what they are views of may be freed while the collective runs.
        self._places = [(load.live, load.layout) for load in loads]
        self._rooms: dict[LiveGroup, Room] = {}
        with step_range(StepKind.GATHER_ISSUE, self._names):
            buffer, own = _bucket(loads, group, comm)
            self.work = all_gather(buffer, own, group, comm)
        self._buffer: Tensor | None = buffer
        first.counters.all_gathers += 1

    def _names(self) -> list[str]:
        """The groups' FQNs, with the parameters' places where not all of a group travel."""
        return [
            live.fqn
            if len(layout.indices) == len(live.fsdp.params)
            else f"{live.fqn} {list(layout.indices)}"
            for live, layout in self._places
        ]

    def take(self, live: LiveGroup) -> Room:
        """What of `live` travelled. The first call waits and copies everything out."""
        if self._buffer is not None:
            with step_range(StepKind.GATHER_WAIT, self._names):
                self.drain()
                rooms = [room_for(*place) for place in self._places]
                _copy_out(self._buffer, rooms)
            lives = (live for live, _ in self._places)
            self._rooms = dict(zip(lives, rooms, strict=True))
            self._free()
        return self._rooms.pop(live)

    def drain(self) -> None:
        """Wait for the collective, if it is not done."""
        if self.work is not None:
            finish(self.work, self._places[0][0])
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

    Parameters that are here stand in `_rooms` (None after the release). What is in `_under_way` is
    waited for. missing: how many parameters are neither.
    """

    __slots__ = ("_dtypes", "_live", "_rooms", "_spread", "_under_way", "_versions", "missing")

    def __init__(self, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        fsdp = live.fsdp
        self._live = live
        self._dtypes = dtypes
        self._versions = fsdp.versions()
        self._under_way: list[tuple[Layout, Bucket]] = []
        self._rooms: list[Room] | None = []
        self._spread: Held | None = None
        self.missing = len(dtypes)
        held, live.held = live.fresh(dtypes), None
        if not fsdp.is_sharded:
            taken = fsdp.unsharded()
            if taken is not None:
                held = None
                self._copy_in(layout_of(live, live.places, dtypes, fsdp.world_size), taken)
            fsdp.reshard()
        if held is not None and held.rooms:
            self._rooms += held.rooms
            self.missing = 0
        elif held is not None:
            self._spread = held

    @property
    def route(self) -> tuple[dist.ProcessGroup | None, object]:
        """Process group, and whose collective it is: what is equal may share a bucket."""
        return self._group, self._live.fsdp.gather_comm_kind

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self._spread is not None:
            return self._spread.part_of
        return self._live.fsdp.gather_process_group

    def load(self, indices: tuple[int, ...]) -> Load | None:
        """What of parameters `indices` has still to travel; None if nothing has."""
        if not self.missing:
            return None
        here, live = self._here(), self._live
        if self.missing < len(self._dtypes):
            layouts = [room.layout for room in here] + [layout for layout, _ in self._under_way]
            known = {index for layout in layouts for index in layout.indices}
            indices = tuple(i for i in indices if i not in known)
            if not indices:
                return None
        live.fsdp.wait_for_optimizer()
        source = live.shards() if self._spread is None else self._spread.parts
        group = self._group
        layout = layout_of(live, indices, self._dtypes, 1 if group is None else group.size())
        return Load(live, layout, [source[i] for i in indices])

    def sent(self, load: Load, bucket: Bucket | None) -> None:
        """`load` travels in `bucket`; None: this rank has all of it, so that a copy is enough."""
        if bucket is None:
            self._copy_in(load.layout, load.parts)
        else:
            self._under_way.append((load.layout, bucket))
            self.missing -= len(load.layout.indices)
        if not self.missing:
            self._spread = None

    def _copy_in(self, layout: Layout, flats: Sequence[Tensor]) -> None:
        room = room_for(self._live, layout)
        torch._foreach_copy_(room.flats, list(flats))
        self._here().append(room)
        self.missing -= len(layout.indices)

    def wait(self, indices: Sequence[int]) -> Mapping[int, Tensor]:
        """Gathered parameters by index, each of its unsharded size: `indices`, perhaps others."""
        rooms = self._here()
        for one in tuple(self._under_way):
            if not set(indices).isdisjoint(one[0].indices):
                rooms.append(one[1].take(self._live))
                self._under_way.remove(one)
        if len(rooms) == 1:
            return parameters(self._live, rooms[0])
        return {i: t for room in rooms for i, t in parameters(self._live, room).items()}

    def release(self, *, keep: bool) -> None:
        """Give the memory back, or keep it for a later gather of the same shards."""
        rooms, live = self._taken(), self._live
        if keep:
            live.held = Held(self._dtypes, self._versions, tuple(rooms))
            return
        live.held = None
        for room in rooms:
            give_back(live, room)

    def release_to(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of each parameter, spread over the smaller `group`."""
        rooms, live = self._taken(), self._live
        size, rank = group.size(), group.rank()
        flats = {i: f for r in rooms for i, f in zip(r.layout.indices, r.flats, strict=True)}
        parts = tuple(flats[i].chunk(size)[rank].clone() for i in live.places)
        live.held = Held(self._dtypes, self._versions, parts=parts, part_of=group)
        for room in rooms:
            give_back(live, room)

    def fits(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Still what a gather of these dtypes would fetch now."""
        return dtypes == self._dtypes and self._versions == self._live.fsdp.versions()

    def drain(self) -> None:
        """Wait for what is under way and throw it away."""
        for _, bucket in self._under_way:
            bucket.drop()

    def _here(self) -> list[Room]:
        if self._rooms is None:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was used after its release")
        return self._rooms

    def _taken(self) -> list[Room]:
        """Where all parameters stand; this gather has none afterwards."""
        rooms = self._here()
        if self._under_way or self.missing:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was released before its wait")
        self._rooms = None
        return rooms


def issue(wanted: Iterable[tuple[Gather, tuple[int, ...]]]) -> list[Bucket]:
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
        issue([(live.prefetched, live.places)])


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


def _bucket(loads: Sequence[Load], group: dist.ProcessGroup, comm: Any) -> tuple[Tensor, Tensor]:
    """Output of the all-gather and this rank's filled part of it.

    Parameters of different dtypes travel as bytes, as in FSDP2.
    """
    parts = [part for load in loads for part in load.parts]
    columns = [count for load in loads for count in load.layout.columns]
    wires = {load.layout.wire for load in loads}
    wire = wires.pop() if len(wires) == 1 else None
    if wire is None:
        dtypes = [dtype for load in loads for dtype in load.layout.dtypes]
        parts = [p.to(d).view(torch.uint8) for p, d in zip(parts, dtypes, strict=True)]
        columns = [part.numel() for part in parts]
        wire = torch.uint8
    total = sum(columns)
    bucket = comm.allocate((total * group.size(),), dtype=wire, device=parts[0].device)
    own = bucket.narrow(0, total * group.rank(), total)
    if {part.dtype for part in parts} == {wire}:
        torch.cat(parts, out=own)  # the same bytes, without a view of each place
    else:
        torch._foreach_copy_(own.split_with_sizes(columns), parts)
    return bucket, own


def _copy_out(bucket: Tensor, rooms: Sequence[Room]) -> None:
    """From rank-major (the wire) to parameter-major (what compute sees)."""
    rows = [row for room in rooms for row in room.rows]
    columns = [count for room in rooms for count in room.layout.columns]
    if any(room.layout.wire != bucket.dtype for room in rooms):
        rows = [row.view(torch.uint8) for row in rows]
        columns = [row.shape[1] for row in rows]
    ranks = rooms[0].layout.ranks
    torch.split_with_sizes_copy(bucket.view(ranks, -1), columns, dim=1, out=rows)
