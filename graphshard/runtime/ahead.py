"""Gathers of the next step, issued as soon as the optimizer has changed what they send.

For `options={"overlap_optimizer": True}`. In: what a forward issues before it waits for anything
(its opening), and the moments in which some optimizer's step ends. Afterwards the opening of the
next forward is on its way, while the program zeroes gradients, logs and loads data, or, with an
optimizer in backward, while the rest of backward runs. A forward that finds its shards changed
again since, on any rank, gathers them again, so that this is right whatever the program does in
between (`graphshard.runtime.doubt`).

All ranks issue the same, as long as they step the same optimizers in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphshard.runtime.gather import Gather, issue
from graphshard.runtime.live import LiveGroup, Root, Versions


@dataclass(frozen=True, slots=True)
class SentGroup:
    """What one group sent in an opening. versions: of its shards then."""

    live: LiveGroup
    dtypes: tuple[torch.dtype, ...]
    places: tuple[int, ...]
    versions: Versions


SentBucket: TypeAlias = tuple[SentGroup, ...]


@dataclass(slots=True)
class Opening:
    """The collectives that a forward issued before its first wait, in order."""

    buckets: tuple[SentBucket, ...] = ()


def remember(buckets: Sequence[SentBucket]) -> None:
    """A forward has issued `buckets` and waits now.

    Where a model runs as several graphs, the first after an optimizer step counts.
    """
    for root in dict.fromkeys(bucket[0].live.root for bucket in buckets):
        opening = None if root is None else root.opening
        if opening is not None and not _is_current(opening):
            opening.buckets = tuple(bucket for bucket in buckets if bucket[0].live.root is root)


def _is_current(opening: Opening) -> bool:
    entries = [entry for bucket in opening.buckets for entry in bucket]
    return bool(entries) and all(e.versions == e.live.fsdp.versions() for e in entries)


def follow_optimizers(root: Root) -> None:
    """From now on each optimizer step that ends may issue the opening of `root`."""
    if root.opening is not None:
        return
    root.opening = Opening()
    watched = weakref.ref(root)

    def stepped(*_: Any) -> None:
        alive = watched()
        if alive is not None and alive.opening is not None:
            send_ahead(alive.opening)

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(root, handle.remove)


def send_ahead(opening: Opening) -> None:
    """Issue, in their order, the first collectives that send nothing but new contents.

    Frozen parameters go with the trained ones after them.
    """
    due = list(takewhile(_is_due, opening.buckets))
    if not any(any(entry.live.fsdp.trainable) for bucket in due for entry in bucket):
        return
    opening.buckets = opening.buckets[len(due) :]
    for bucket in due:
        gathers = []
        for entry in bucket:
            gather = entry.live.prefetched or Gather.begin(entry.live, entry.dtypes)
            gather.sent_bytes |= _copies(entry)
            entry.live.prefetched = gather
            gathers.append((gather, entry.places))
        issue(gathers)


def _copies(entry: SentGroup) -> dict[int, Tensor]:
    """Of what is sent. A shard's bytes for each group of an opening, between two steps, where no
    activation takes memory."""
    shards = entry.live.shards()
    return {i: shards[i].clone() for i in entry.places}


def _is_due(bucket: SentBucket) -> bool:
    """Every trainable parameter of these groups was changed, and FSDP2 has gathered none.

    None has extensions: what these send may depend on what is done after the step (scales).
    """
    return all(
        entry.live.fsdp.is_sharded and not entry.live.fsdp.has_extensions and _all_changed(entry)
        for entry in bucket
    )


def _all_changed(entry: SentGroup) -> bool:
    fsdp = entry.live.fsdp
    (places, counts), (old_places, old_counts) = fsdp.versions(), entry.versions
    number = len(places)
    # A parameter has two counts: of its DTensor and of its local tensor.
    return all(
        (places[i], counts[i], counts[i + number])
        != (old_places[i], old_counts[i], old_counts[i + number])
        for i, trains in enumerate(fsdp.trainable)
        if trains
    )
