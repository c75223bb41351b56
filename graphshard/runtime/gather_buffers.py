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

from graphshard.runtime.live import LiveGroup


@dataclass(frozen=True, slots=True, eq=False)
class GatherLayout:
    """What parameters `indices` of a group are in a gather over `ranks`; made once for each case.

    columns: elements of each rank's part. wire: the one dtype, or None if there are several.
    """

    indices: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    ranks: int
    columns: tuple[int, ...]
    wire: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class GatherBuffer:
    """Memory for one layout.

    flats: each parameter, one-dimensional, with FSDP2's padding. rows: the same, one row per rank.
    views: what compute sees, by parameter index, of those that are sharded on dim 0.
    storages: empty if the memory is that of the shards (`own_buffer`). addresses, owners: torch's
    of the storages, and how many tensors hold these while nobody else looks at them.
    """

    layout: GatherLayout
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
        chosen = tuple(dtypes[i] for i in indices)
        world, params = live.fsdp.world_size, live.fsdp.params
        columns = tuple(params[i].padded_numel * world // ranks for i in indices)
        wire = chosen[0] if len(set(chosen)) == 1 else None
        known = live.layouts[key] = GatherLayout(indices, chosen, ranks, columns, wire)
    return known


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
    if live.fsdp.world_size > 1 or tuple([s.dtype for s in shards]) != layout.dtypes:
        return None
    known: GatherBuffer | None = live.own_buffers.get(layout)
    if known is None or not all(map(is_, known.flats, shards)):
        with torch.inference_mode(False), torch.no_grad():
            views = _views(live, layout, shards)
        known = live.own_buffers[layout] = GatherBuffer(
            layout, tuple(shards), (), views, (), (), (), 0
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
    if len(buffer.views) == len(buffer.flats):
        return buffer.views
    found = dict(buffer.views)
    for index, flat in zip(buffer.layout.indices, buffer.flats, strict=True):
        if index not in found:
            param = live.fsdp.params[index]
            shards = flat.view(live.fsdp.world_size, *param.padded_shard_size).unbind(0)
            found[index] = torch.cat(shards, dim=param.shard_dim)
    return found


def _new_buffer(live: LiveGroup, layout: GatherLayout) -> GatherBuffer:
    # Its tensors outlive an inference mode that may be on now.
    with torch.inference_mode(False), torch.no_grad():
        flats = tuple(
            torch.empty(columns * layout.ranks, dtype=dtype, device=live.fsdp.device)
            for columns, dtype in zip(layout.columns, layout.dtypes, strict=True)
        )
        rows = tuple(flat.view(layout.ranks, -1) for flat in flats)
        views = _views(live, layout, flats)
        storages = tuple(flat.untyped_storage() for flat in flats)
        sizes_bytes = tuple(storage.nbytes() for storage in storages)
        addresses = tuple(storage._cdata for storage in storages)
        owners = _owners(addresses)
        return GatherBuffer(layout, flats, rows, views, storages, sizes_bytes, addresses, owners)


def _views(live: LiveGroup, layout: GatherLayout, flats: Sequence[Tensor]) -> dict[int, Tensor]:
    """What compute sees of each parameter that lies in its flat memory as it is."""
    whole = live.fsdp.world_size == 1
    rows = [(i, live.fsdp.params[i], f) for i, f in zip(layout.indices, flats, strict=True)]
    return {
        index: flat[: math.prod(param.size)].view(param.size)
        for index, param, flat in rows
        if whole or param.shard_dim == 0
    }


def _owners(addresses: tuple[int, ...]) -> int:
    """How many tensors and storages hold these memories together."""
    return sum(map(torch._C._storage_Use_Count, addresses))
