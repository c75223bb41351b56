"""Where gathered parameters stand: views that are made once, on memory that comes and goes.

In: a live group, parameters of it, the dtypes to gather them in. Out: a `GatherBuffer` with memory,
to be filled and looked at. Afterwards (`give_back`) the memory is freed and the buffer waits for
the next gather of the same parameters, so that a steady step makes no tensor for any parameter.

As in FSDP2, freeing resizes a parameter's storage to nothing. That is only done while nobody but
it looks at the storage; else the buffer is forgotten, and the memory lives as long as the view.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, UntypedStorage

from graphshard.fsdp2 import FsdpGroup, FsdpParam, extensions
from graphshard.runtime.live import LiveGroup


@dataclass(frozen=True, slots=True, eq=False)
class GatherLayout:
    """What parameters `indices` of a group are in a gather over `ranks`; made once for each case.

    param_dtypes, numels: of each parameter in memory, all ranks' parts. dtypes, columns: of each
    tensor that travels, with the elements of each rank's part; that is one for each parameter, but
    for what all-gather extensions say. wire: the one dtype, or None if there are several.
    """

    indices: tuple[int, ...]
    param_dtypes: tuple[torch.dtype, ...]
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    ranks: int
    columns: tuple[int, ...]
    wire: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class GatherBuffer:
    """Memory for one layout.

    wholes: each parameter, one-dimensional, with FSDP2's padding; bytes where extensions make
    something of what arrives. flats: what arrives, one-dimensional. rows: the same, one per rank.
    views: what compute sees, by parameter index, of those that are sharded on dim 0.
    storages: empty if the memory is that of the shards (`own_buffer`). addresses, owners: torch's
    of the storages, and how many tensors hold these while nobody else looks at them.
    """

    layout: GatherLayout
    wholes: tuple[Tensor, ...]
    flats: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    views: Mapping[int, Tensor]
    storages: tuple[UntypedStorage, ...]
    sizes_bytes: tuple[int, ...]
    addresses: tuple[int, ...]
    owners: int


def layout_of(
    live: LiveGroup, indices: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ranks: int
) -> GatherLayout:
    """dtypes: of all parameters of the group."""
    key = indices, dtypes, ranks
    known = live.layouts.get(key)
    if known is None:
        known = live.layouts[key] = _new_layout(live.fsdp, indices, dtypes, ranks)
    return known


def _new_layout(
    fsdp: FsdpGroup, indices: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ranks: int
) -> GatherLayout:
    numels: list[int] = []
    sent: list[tuple[torch.dtype, int]] = []
    for index in indices:
        param = fsdp.params[index]
        if param.extension is None:
            numels.append(param.padded_numel * fsdp.world_size)
            sent.append((dtypes[index], numels[-1] // ranks))
        else:
            numels.append(param.extension.held_bytes)
            sent += [(dtype, math.prod(size)) for size, dtype in param.extension.sent]
    wires = {dtype for dtype, _ in sent}
    return GatherLayout(
        indices=indices,
        param_dtypes=tuple(dtypes[index] for index in indices),
        numels=tuple(numels),
        dtypes=tuple(dtype for dtype, _ in sent),
        ranks=ranks,
        columns=tuple(columns for _, columns in sent),
        wire=wires.pop() if len(wires) == 1 else None,
    )


def buffer_for(live: LiveGroup, layout: GatherLayout) -> GatherBuffer:
    """A buffer with memory, what is in it undefined."""
    buffer = live.buffers.pop(layout, None)
    if buffer is None:
        return _new_buffer(live, layout)
    if not any(map(UntypedStorage.nbytes, buffer.storages)):  # else FSDP2 keeps storage
        deque(map(UntypedStorage.resize_, buffer.storages, buffer.sizes_bytes), maxlen=0)
    return buffer


def own_buffer(
    live: LiveGroup, layout: GatherLayout, shards: Sequence[Tensor]
) -> GatherBuffer | None:
    """`shards` where they are, as a buffer that is never freed; None if they are not the whole
    parameters, in the dtypes of `layout`.

    Made once: FSDP2 keeps a shard's tensor until the parameter is replaced.
    """
    if live.fsdp.world_size > 1 or live.fsdp.has_extensions:
        return None
    if tuple([s.dtype for s in shards]) != layout.dtypes:
        return None
    known: GatherBuffer | None = live.own_buffers.get(layout)
    if known is None or not all(map(is_, known.wholes, shards)):
        with torch.inference_mode(False), torch.no_grad():
            views = _views(live, layout, shards)
        known = live.own_buffers[layout] = GatherBuffer(
            layout, tuple(shards), (), (), views, (), (), (), 0
        )
    return known


def give_back(live: LiveGroup, buffer: GatherBuffer) -> None:
    """What is in `buffer` is not needed any more."""
    if not buffer.storages:
        return
    if _owners(buffer.addresses) != buffer.owners:
        return
    if not live.fsdp.keeps_storage:
        free(buffer)
    live.buffers[buffer.layout] = buffer


def free(buffer: GatherBuffer) -> None:
    for storage in buffer.storages:
        storage.resize_(0)


def parameters(live: LiveGroup, buffer: GatherBuffer) -> Mapping[int, Tensor]:
    """Each parameter of a filled buffer, of its unsharded size, by index."""
    if len(buffer.views) == len(buffer.layout.indices):
        return buffer.views
    found = dict(buffer.views)
    for index, flat in zip(buffer.layout.indices, buffer.wholes, strict=True):
        if index not in found:
            param = live.fsdp.params[index]
            shards = flat.view(live.fsdp.world_size, *param.padded_shard_size).unbind(0)
            found[index] = torch.cat(shards, dim=param.shard_dim)
    return found


def fill(live: LiveGroup, buffer: GatherBuffer, metadata: Mapping[int, object]) -> None:
    """Extensions make parameters of what has arrived. metadata: from when it was sent."""
    with torch.inference_mode(False):
        for index, whole in zip(buffer.layout.indices, buffer.wholes, strict=True):
            param = live.fsdp.params[index]
            if param.extension is not None:
                extensions.fill(param.raw, param.extension, whole, metadata[index])


def _new_buffer(live: LiveGroup, layout: GatherLayout) -> GatherBuffer:
    # Its tensors outlive an inference mode that may be on now.
    with torch.inference_mode(False), torch.no_grad():
        params = [live.fsdp.params[index] for index in layout.indices]
        wholes = tuple(
            torch.empty(numel, dtype=dtype, device=live.fsdp.device)
            for numel, dtype in zip(layout.numels, layout.param_dtypes, strict=True)
        )
        flats = tuple(
            flat
            for param, whole in zip(params, wholes, strict=True)
            for flat in _arrives(param, whole)
        )
        rows = tuple(flat.view(layout.ranks, -1) for flat in flats)
        views = _views(live, layout, wholes)
        storages = tuple(whole.untyped_storage() for whole in wholes)
        sizes_bytes = tuple(storage.nbytes() for storage in storages)
        addresses = tuple(storage._cdata for storage in storages)
        owners = _owners(addresses)
        return GatherBuffer(
            layout, wholes, flats, rows, views, storages, sizes_bytes, addresses, owners
        )


def _arrives(param: FsdpParam, whole: Tensor) -> list[Tensor]:
    if param.extension is None:
        return [whole]
    return [place.within(whole).view(-1) for place in param.extension.arrived]


def _views(live: LiveGroup, layout: GatherLayout, wholes: Sequence[Tensor]) -> dict[int, Tensor]:
    """What compute sees of each parameter that lies in its memory as it is."""
    fsdp, views = live.fsdp, {}
    for index, whole in zip(layout.indices, wholes, strict=True):
        param = fsdp.params[index]
        if param.extension is not None:
            views[index] = whole.view(-1)
        elif fsdp.world_size == 1 or param.shard_dim == 0:
            views[index] = whole[: math.prod(param.size)].view(param.size)
    return views


def _owners(addresses: tuple[int, ...]) -> int:
    """How many tensors and storages hold these memories together."""
    return sum(map(torch._C._storage_Use_Count, addresses))
