"""Bytes that are gathered: really, by weak references on storages, and by the plan.

Nothing that the runtime or the plan says is read for the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from patching import patched
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.runtime import buckets, gather, run
from graphshard.runtime.gather_buffers import GatherBuffer
from graphshard.schedule.plan import Plan, Step, StepKind


class Storages:
    """Memory that holds gathered parameters, counted by weak references on its storages."""

    def __init__(self) -> None:
        self.refs: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.refs[storage._cdata] = StorageWeakRef(storage)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())

    def alive_bytes(self) -> int:
        self.refs = {k: ref for k, ref in self.refs.items() if not ref.expired()}
        storages = (torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in self.refs.values())
        return sum(storage.nbytes() for storage in storages if storage is not None)


@contextmanager
def watch_gathered() -> Iterator[Storages]:
    seen = Storages()

    def watching(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for tensor in result.flats if isinstance(result, GatherBuffer) else result:
                seen.add(tensor)
            return result

        return call

    with (
        patched(buckets, "_bucket", watching),
        patched(buckets, "buffer_for", watching),
        patched(gather, "buffer_for", watching),
    ):
        yield seen


class Samples:
    """Stands for the stopwatch: at every mark, what is gathered."""

    def __init__(self, seen: Storages, alive: list[int]) -> None:
        self.seen, self.alive = seen, alive

    def mark(self, index: int) -> None:
        self.alive.append(self.seen.alive_bytes())

    def watch(self, work: Any) -> Any:
        return work


def sampled_on(
    model: Any, batch: tuple[Tensor, ...], ranges: list[tuple[Step, ...]]
) -> list[tuple[Step, int]]:
    """Each communication step of one training step, with the bytes gathered after it."""
    alive: list[int] = []
    with (
        watch_gathered() as seen,
        patched(run, "stopwatch", lambda _: lambda device: Samples(seen, alive)),
    ):
        model(*batch).backward()
    found = []
    for steps in ranges:
        after, alive = alive[1 : len(steps) + 1], alive[len(steps) + 1 :]
        found += [(s, size) for s, size in zip(steps, after, strict=True) if s.group is not None]
    assert alive == []
    return found


def planned(plan: Plan) -> list[tuple[Step, int]]:
    """The same by the plan: a group counts from its gather's issue to its release."""
    held: dict[int, int] = {}
    found = []
    for step in (s for schedule in plan.schedules for s in schedule.steps if s.group is not None):
        for group in (plan.groups[g] for g in step.groups):
            chosen = [group.params[place].gathered_bytes for place in step.params]
            size = sum(chosen) if chosen else group.gathered_bytes
            if step.kind is StepKind.GATHER_ISSUE and not step.kept:
                held[group.id] = held.get(group.id, 0) + size
            elif step.kind is StepKind.RELEASE and not step.kept:
                del held[group.id]
        found.append((step, sum(held.values())))
    return found


def recording(ranges: list[tuple[Step, ...]]) -> Callable[[Any], Any]:
    """In the place of `instrument.with_marks`: ranges gets the steps that are marked."""

    def record(original: Any) -> Any:
        def with_marks(*args: Any) -> Any:
            module, steps = original(*args)
            ranges.append(steps)
            return module, steps

        return with_marks

    return record
