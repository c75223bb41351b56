"""One all-gather on its way: what is sent, where it arrives, and how it becomes parameters.

In: what each group puts into one collective. Out, after the wait: a filled `GatherBuffer` for each
group.

There are two ways with the same bytes on the wire. `InPlaceGather` sends each shard from where it
is, and it arrives where compute reads it: nothing is copied. `PackedGather` is FSDP2's way: shards
are copied into one buffer, and out of it. It serves whoever changed FSDP2's collective, and
backends that would copy all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from graphshard.runtime.gather_buffers import (
    GatherBuffer,
    GatherLayout,
    buffer_for,
    fill,
    give_back,
)
from graphshard.runtime.host_copies import Way, queue_of
from graphshard.runtime.issued import note
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.waiting import NamedCollective, finish, trying_in_place
from graphshard.schedule.steps import StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """What one group puts into a collective: this rank's parts of the parameters of `layout`.

    metadata: what all-gather extensions gave beside their parts, by parameter index.
    """

    live: LiveGroup
    layout: GatherLayout
    parts: Sequence[Tensor]
    metadata: Mapping[int, object] = field(default_factory=dict)


class _Collective:
    """One all-gather over several ranks. work: None when it is done."""

    __slots__ = ("_gathered", "_group", "_metadata", "_places", "work")

    def __init__(self, loads: Sequence[Payload], group: dist.ProcessGroup) -> None:
        self._group = group
        # Not the parts: what they are views of may be freed while the collective runs.
        self._places = [(load.live, load.layout) for load in loads]
        self._metadata = {load.live: load.metadata for load in loads}
        self._gathered: dict[LiveGroup, GatherBuffer] = {}
        self.work: dist.Work | None = None

    def _names(self) -> list[str]:
        """The groups' FQNs, with the parameters' places where not all of a group travel."""
        return [
            live.fqn
            if len(layout.indices) == len(live.fsdp.params)
            else f"{live.fqn} {list(layout.indices)}"
            for live, layout in self._places
        ]

    def _filled(self, live: LiveGroup) -> GatherBuffer:
        """Call once, when all has arrived."""
        buffer = self._gathered.pop(live)
        if live.fsdp.has_extensions:
            fill(live, buffer, self._metadata[live])
        return buffer

    def drain(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective, if it is not done."""
        if self.work is not None:
            collective = NamedCollective("all-gather", self._places[0][0], self._names, self._group)
            finish(self.work, collective, limit_s=limit_s)
            self.work = None


class InPlaceGather(_Collective):
    """From its issue until everything is taken."""

    __slots__ = ()

    def __init__(self, loads: Sequence[Payload], group: dist.ProcessGroup) -> None:
        super().__init__(loads, group)
        with step_range(StepKind.GATHER_ISSUE, self._names):
            outputs: list[Tensor] = []
            inputs: list[Tensor] = []
            for load in loads:
                buffer = self._gathered[load.live] = buffer_for(load.live, load.layout)
                outputs += buffer.flats
                inputs += _sent(load, buffer, group.rank())
            if len({output.dtype for output in outputs}) > 1:  # as bytes, like FSDP2
                outputs = [output.view(torch.uint8) for output in outputs]
                inputs = [part.view(torch.uint8) for part in inputs]
            self.work = gather_in_place(outputs, inputs, group)

    def take(self, live: LiveGroup) -> GatherBuffer:
        """What of `live` travelled. The first call waits."""
        if self.work is not None:
            with step_range(StepKind.GATHER_WAIT, self._names):
                self.drain()
        return self._filled(live)

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective and throw its result away."""
        self.drain(limit_s=limit_s)
        for live, buffer in self._gathered.items():
            give_back(live, buffer)
        self._gathered.clear()


class PackedGather(_Collective):
    """From its issue until everything is copied out."""

    __slots__ = ("_buffer",)

    def __init__(self, loads: Sequence[Payload], group: dist.ProcessGroup) -> None:
        super().__init__(loads, group)
        comm = loads[0].live.fsdp.gather_comm
        with step_range(StepKind.GATHER_ISSUE, self._names):
            buffer, own = _bucket(loads, group, comm)
            self.work = all_gather(buffer, own, group, comm)
        self._buffer: Tensor | None = buffer

    def take(self, live: LiveGroup) -> GatherBuffer:
        """What of `live` travelled. The first call waits and copies everything out."""
        if self._buffer is not None:
            with step_range(StepKind.GATHER_WAIT, self._names):
                self.drain()
                buffers = [buffer_for(*place) for place in self._places]
                _copy_out(self._buffer, buffers)
            lives = (live for live, _ in self._places)
            self._gathered = dict(zip(lives, buffers, strict=True))
            self._free()
        return self._filled(live)

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective and throw its result away."""
        self.drain(limit_s=limit_s)
        self._free()

    def _free(self) -> None:
        if self._buffer is not None:
            # The backend's thread may hold the tensor a little longer: free its memory now.
            self._buffer.untyped_storage().resize_(0)
            self._buffer = None


class OwnCopy:
    """What one rank has to itself, on its way from the host: no collective, but under way like one.

    Made where the host's copies are issued (`graphshard.runtime.host_copies`).
    """

    __slots__ = ("_buffer", "_done", "_load")

    def __init__(self, load: Payload) -> None:
        self._load = load
        self._buffer = buffer_for(load.live, load.layout)
        copy_over(self._buffer.flats, load.parts)
        self._done = queue_of(load.live.fsdp.device, Way.TO_DEVICE).so_far()

    def take(self, live: LiveGroup) -> GatherBuffer:
        """What of `live` was copied. Waits."""
        self._done.wait()
        fill(live, self._buffer, self._load.metadata)
        return self._buffer

    def drop(self, *, limit_s: float | None = None) -> None:
        """Nobody needs it."""
        self._done.drop()
        give_back(self._load.live, self._buffer)


AllGather: TypeAlias = InPlaceGather | PackedGather


def send(loads: Sequence[Payload], group: dist.ProcessGroup) -> AllGather:
    """Issue one all-gather of `loads`."""
    collective: AllGather | None = None
    note(loads[0].live, tuple([load.layout for load in loads]), partial(_described, loads))
    if all(load.live.fsdp.gathers_in_place for load in loads):
        with trying_in_place([load.live for load in loads]):
            collective = InPlaceGather(loads, group)
    if collective is None:
        collective = PackedGather(loads, group)
    loads[0].live.counters.all_gathers += 1
    return collective


def _described(loads: Sequence[Payload]) -> str:
    """An all-gather as the ranks compare it: what travels, in which dtypes, how many bytes."""
    places = [
        f"{load.live.fqn} {list(load.layout.indices)} as {load.layout.dtypes}" for load in loads
    ]
    return f"all-gather of {' + '.join(places)}"


def _sent(load: Payload, buffer: GatherBuffer, rank: int) -> Sequence[Tensor]:
    """Each shard where it is, or, where it has to be cast or comes from the host, where it will be
    in the result."""
    device = load.live.fsdp.device
    moved = [
        (index, part)
        for index, (part, dtype) in enumerate(zip(load.parts, load.layout.dtypes, strict=True))
        if part.dtype != dtype or part.device != device
    ]
    if not moved:
        return load.parts
    sent = list(load.parts)
    for index, _ in moved:
        sent[index] = buffer.rows[index][rank]
    copy_over([sent[index] for index, _ in moved], [part for _, part in moved])
    return sent


def copy_over(targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """From the host, too, as they are there: the device casts."""
    device = targets[0].device
    if all(part.device == device for part in parts):
        torch._foreach_copy_(list(targets), list(parts))
        return
    for target, part in zip(targets, parts, strict=True):
        same = part.dtype == target.dtype
        target.copy_(part if same else part.to(device, non_blocking=True), non_blocking=True)


def gather_in_place(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Asynchronous all-gather of each input into the output at its place, as one collective."""
    options = AllgatherOptions()
    options.asyncOp = True
    return group.allgather_into_tensor_coalesced(outputs, inputs, options)


def all_gather(
    bucket: Tensor, own: Tensor, group: dist.ProcessGroup, comm: Any
) -> dist.Work | None:
    """Asynchronous all-gather of `own` (a view into `bucket`) into `bucket` by FSDP2's `comm`."""
    work = comm(output_tensor=bucket, input_tensor=own, group=group, async_op=True)
    return work  # type: ignore[no-any-return]


def _bucket(loads: Sequence[Payload], group: dist.ProcessGroup, comm: Any) -> tuple[Tensor, Tensor]:
    """Output of the all-gather and this rank's filled part of it.

    Parameters of different dtypes travel as bytes, as in FSDP2.
    """
    parts = [part for load in loads for part in load.parts]
    columns = [count for load in loads for count in load.layout.columns]
    wires = {load.layout.wire for load in loads}
    wire = wires.pop() if len(wires) == 1 else None
    device = loads[0].live.fsdp.device
    if wire is None:
        dtypes = [dtype for load in loads for dtype in load.layout.dtypes]
        parts = [part.to(device, non_blocking=True) for part in parts]
        parts = [p.to(d).view(torch.uint8) for p, d in zip(parts, dtypes, strict=True)]
        columns = [part.numel() for part in parts]
        wire = torch.uint8
    total = sum(columns)
    bucket = comm.allocate((total * group.size(),), dtype=wire, device=device)
    own = bucket.narrow(0, total * group.rank(), total)
    if {(part.dtype, part.device) for part in parts} == {(wire, device)}:
        torch.cat(parts, out=own)  # the same bytes, without a view of each place
    else:
        copy_over(own.split_with_sizes(columns), parts)
    return bucket, own


def _copy_out(bucket: Tensor, buffers: Sequence[GatherBuffer]) -> None:
    """From rank-major (the wire) to parameter-major (what compute sees)."""
    rows = [row for buffer in buffers for row in buffer.rows]
    columns = [count for buffer in buffers for count in buffer.layout.columns]
    if any(buffer.layout.wire != bucket.dtype for buffer in buffers):
        rows = [row.view(torch.uint8) for row in rows]
        columns = [row.shape[1] for row in rows]
    ranks = buffers[0].layout.ranks
    torch.split_with_sizes_copy(bucket.view(ranks, -1), columns, dim=1, out=rows)
