"""All-gathers: what travels in one collective, and what a group has of it until its release.

An `AllGather` is one collective: whole groups, or some parameters of one. A `Gather` is one
gathered use of a group, from its first issue to its release. `issue` has what gathers still miss
sent by `graphshard.runtime.buckets`, which calls the process group.
Bytes on the wire and their order are FSDP2's: each rank's padded shards, cast to the gather dtypes,
in registration order, group after group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import extensions
from graphshard.runtime.buckets import AllGather, OwnCopy, Payload, send
from graphshard.runtime.gather_buffers import (
    GatherBuffer,
    GatherLayout,
    buffer_for,
    fill,
    give_back,
    layout_of,
    own_buffer,
    parameters,
)
from graphshard.runtime.host_copies import Way, queue_of
from graphshard.runtime.live import KeptParams, LiveGroup

Route: TypeAlias = tuple[dist.ProcessGroup | None, object, bool]


class Gather:
    """One gathered use of a group, from its first issue to its release.

    Parameters that are here stand in `_gathered` (None after the release). What is in `_under_way`
    is waited for. missing: how many parameters are neither. was_kept: it began with what was kept.
    sent_bytes: of a gather that an optimizer step issued, copies of what it sent, by parameter; the
    forward that finds it compares them (`graphshard.runtime.doubt`).
    """

    __slots__ = (
        "_dtypes",
        "_gathered",
        "_live",
        "_spread",
        "_under_way",
        "_versions",
        "missing",
        "sent_bytes",
        "was_kept",
    )

    def __init__(self, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        """Of which nothing is there yet; see `begin`."""
        self._live = live
        self._dtypes = dtypes
        self._versions = live.fsdp.versions()
        self._under_way: list[tuple[GatherLayout, AllGather | OwnCopy]] = []
        self._gathered: list[GatherBuffer] | None = []
        self._spread: KeptParams | None = None
        self.missing = len(dtypes)
        self.sent_bytes: dict[int, Tensor] = {}
        self.was_kept = False

    @classmethod
    def begin(cls, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> Gather:
        """With what is there already: what an earlier gather kept, or what FSDP2's `unshard()`
        gathered, which is copied.

        FSDP2 is SHARDED afterwards, unless its own forward or backward of the group, outside of
        the graph, is at work with its parameters.
        """
        gather, fsdp = cls(live, dtypes), live.fsdp
        kept, live.kept = live.fresh(dtypes), None
        gather.was_kept = kept is not None
        if not fsdp.is_sharded:
            taken = fsdp.unsharded()
            if taken is not None:
                kept = None
                gather._copy_in(layout_of(live, live.places, dtypes, fsdp.world_size), taken)
            if not fsdp.is_at_work:
                fsdp.reshard()
        if kept is not None and kept.buffers:
            gather._buffers_here().extend(kept.buffers)
            gather.missing = 0
        elif kept is not None:
            gather._spread = kept
        return gather

    @property
    def route(self) -> Route:
        """Process group, whose collective it is, whether the host has the shards: what is equal may
        share a bucket."""
        fsdp = self._live.fsdp
        return self._group, fsdp.gather_comm_kind, fsdp.is_on_host

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self._spread is not None:
            return self._spread.part_of
        return self._live.fsdp.gather_process_group

    def payload(self, indices: tuple[int, ...]) -> Payload | None:
        """What of parameters `indices` has still to travel; None if nothing has."""
        if not self.missing:
            return None
        here, live = self._buffers_here(), self._live
        if self.missing < len(self._dtypes):
            layouts = [buffer.layout for buffer in here] + [layout for layout, _ in self._under_way]
            known = {index for layout in layouts for index in layout.indices}
            indices = tuple(i for i in indices if i not in known)
            if not indices:
                return None
        source = live.shards() if self._spread is None else self._spread.parts
        group = self._group
        layout = layout_of(live, indices, self._dtypes, 1 if group is None else group.size())
        if live.fsdp.has_extensions:
            return Payload(live, layout, *_by_extensions(live, indices, source))
        return Payload(live, layout, [source[i] for i in indices])

    def wait_for_optimizer(self) -> None:
        """Whatever is sent from now on is what the optimizer made."""
        self._live.fsdp.wait_for_optimizer()

    def from_host(self) -> AbstractContextManager[None]:
        """What is issued within it goes by way of the host's copies, beside compute."""
        return queue_of(self._live.fsdp.device, Way.TO_DEVICE).beside()

    def sent(self, load: Payload, collective: AllGather | None) -> None:
        """`load` travels in `collective`; None: this rank has all of it."""
        is_on_host = self._live.fsdp.is_on_host
        under_way = OwnCopy(load) if collective is None and is_on_host else collective
        if under_way is None:
            self._take_own(load)
        else:
            self._under_way.append((load.layout, under_way))
            self.missing -= len(load.layout.indices)
        if not self.missing:
            self._spread = None

    def _copy_in(self, layout: GatherLayout, wholes: Sequence[Tensor]) -> None:
        buffer = buffer_for(self._live, layout)
        torch._foreach_copy_(buffer.wholes, list(wholes))
        self._add(buffer)

    def _add(self, buffer: GatherBuffer) -> None:
        self._buffers_here().append(buffer)
        self.missing -= len(buffer.layout.indices)

    def _take_own(self, load: Payload) -> None:
        """On one rank compute reads the shards themselves, unless they have to be cast."""
        buffer = own_buffer(self._live, load.layout, load.parts)
        if buffer is None:
            buffer = buffer_for(self._live, load.layout)
            torch._foreach_copy_(buffer.flats, list(load.parts))
            fill(self._live, buffer, load.metadata)
        self._add(buffer)

    def wait(self, indices: Sequence[int]) -> Mapping[int, Tensor]:
        """Gathered parameters by index, each of its unsharded size: `indices`, perhaps others."""
        buffers = self._buffers_here()
        for one in tuple(self._under_way):
            if not set(indices).isdisjoint(one[0].indices):
                buffers.append(one[1].take(self._live))
                self._under_way.remove(one)
        if len(buffers) == 1:
            return parameters(self._live, buffers[0])
        return {i: t for buffer in buffers for i, t in parameters(self._live, buffer).items()}

    def release(self, *, keep: bool, to_check: bool = False) -> None:
        """Give the memory back, or keep it for a later gather of the same shards.

        to_check: see `KeptParams`.
        """
        buffers, live = self._taken(), self._live
        if keep:
            live.kept = KeptParams(self._dtypes, self._versions, tuple(buffers), to_check=to_check)
            return
        live.kept = None
        for buffer in buffers:
            give_back(live, buffer)

    def release_to(self, group: dist.ProcessGroup, *, to_check: bool = False) -> None:
        """Keep this rank's part of each parameter, spread over the smaller `group`."""
        buffers, live = self._taken(), self._live
        size, rank = group.size(), group.rank()
        flats = {i: f for r in buffers for i, f in zip(r.layout.indices, r.wholes, strict=True)}
        parts = tuple(flats[i].chunk(size)[rank].clone() for i in live.places)
        live.kept = KeptParams(
            self._dtypes, self._versions, parts=parts, part_of=group, to_check=to_check
        )
        for buffer in buffers:
            give_back(live, buffer)

    def fits(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Still what a gather of these dtypes would fetch now."""
        return dtypes == self._dtypes and self._versions == self._live.fsdp.versions()

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for what is under way and throw it away."""
        for _, collective in self._under_way:
            collective.drop(limit_s=limit_s)

    def _buffers_here(self) -> list[GatherBuffer]:
        """Those that are here, to read or to add to."""
        if self._gathered is None:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was used after its release")
        return self._gathered

    def _taken(self) -> list[GatherBuffer]:
        """Where all parameters stand; this gather has none afterwards."""
        buffers = self._buffers_here()
        if self._under_way or self.missing:
            raise RuntimeStateError("GS403", f"{self._live.fqn} was released before its wait")
        self._gathered = None
        return buffers


def _by_extensions(
    live: LiveGroup, indices: Sequence[int], source: Sequence[Tensor]
) -> tuple[list[Tensor], dict[int, object]]:
    """What of `source` travels where extensions say so, and their metadata."""
    parts: list[Tensor] = []
    metadata: dict[int, object] = {}
    for index in indices:
        param = live.fsdp.params[index]
        if param.extension is None:
            parts.append(source[index])
        else:
            sent, metadata[index] = extensions.send(param.raw, param.extension)
            parts += sent
    return parts, metadata


def issue(wanted: Iterable[tuple[Gather, tuple[int, ...]]]) -> list[AllGather]:
    """Start what is missing of each gather's parameters; what goes the same way goes together.

    Returns the collectives that were issued, in order.

    All ranks issue the same: what leaves a group out (settings, meshes, calls of `unshard()`,
    whether shards were written to) is the same on all of them, as eager FSDP2 needs it, too.
    """
    routes: dict[Route, list[tuple[Gather, tuple[int, ...]]]] = {}
    for gather, indices in wanted:
        if gather.missing:
            gather.wait_for_optimizer()
            routes.setdefault(gather.route, []).append((gather, indices))
    issued: list[AllGather] = []
    for (group, _, is_on_host), entries in routes.items():
        with entries[0][0].from_host() if is_on_host else nullcontext():
            issued += _issue_together(group, entries)
    return issued


def _issue_together(
    group: dist.ProcessGroup | None, entries: Sequence[tuple[Gather, tuple[int, ...]]]
) -> list[AllGather]:
    loads = [(gather, gather.payload(indices)) for gather, indices in entries]
    bucket = [(gather, load) for gather, load in loads if load is not None]
    collective = None
    if bucket and group is not None and group.size() > 1:
        collective = send([load for _, load in bucket], group)
    for gather, load in bucket:
        gather.sent(load, collective)
    return [] if collective is None else [collective]


def prefetch(live: LiveGroup) -> None:
    """Issue the all-gather of a group that some later run will ask for."""
    if live.prefetched is None:
        live.prefetched = Gather.begin(live, live.dtypes)
        issue([(live.prefetched, live.places)])


def take_prefetched(live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> Gather:
    """A gather of these dtypes: the prefetched one if it fits, else a new one.

    What FSDP2 has gathered meanwhile (`unshard()`) comes first, so that it is resharded.
    """
    live.dtypes = dtypes
    ahead, live.prefetched = live.prefetched, None
    if ahead is None:
        return Gather.begin(live, dtypes)
    if ahead.fits(dtypes) and live.fsdp.is_sharded:
        return ahead
    ahead.drop()
    return Gather.begin(live, dtypes)
