"""One execution of one direction. The emitted code calls these methods and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2 import gradients
from graphshard.fsdp2.layouts import as_dtensor
from graphshard.plan import Direction
from graphshard.runtime.calls import ALL_DEFINED, Calls, more_calls_ahead, will_execute
from graphshard.runtime.finish import finish_later
from graphshard.runtime.gather import Gather, prefetch, take_prefetched
from graphshard.runtime.live import LiveGroup, lookup
from graphshard.runtime.reduce import Reduction, keep_unreduced, merge, merge_unreduced
from graphshard.runtime.stopwatch import Stopwatch, stopwatch


@dataclass(slots=True)
class Run:
    """Opens groups and remembers what is in flight, so that an exception leaves nothing behind.

    defined: bit k is set when tangent k of this backward is not missing. watch: takes the times of
    this run, if the emitted code has marks.
    """

    direction: Direction
    defined: int = ALL_DEFINED
    watch: Stopwatch | None = None
    _groups: list[LiveGroup] = field(default_factory=list)
    _gathered: set[LiveGroup] = field(default_factory=set)
    _last: LiveGroup | None = None
    _in_flight: list[Gather | Reduction] = field(default_factory=list)

    def open(self, anchor: Tensor) -> OpenGroup:
        """The group that `anchor` names, for this run."""
        live = lookup(anchor)
        self._groups.append(live)
        if self.direction is Direction.FORWARD:
            live.counters.forwards += 1
        return OpenGroup(self, live)

    def gathered(self, live: LiveGroup) -> None:
        self._gathered.add(live)

    def may_issue(self, live: LiveGroup) -> bool:
        """False for a group that an explicit prefetch list leaves out."""
        named = self._last.fsdp.prefetches(self.direction) if self._last is not None else ()
        return not named or live.fsdp.state in named

    def prefetch_after(self, live: LiveGroup) -> None:
        """`live` is gathered: issue what `set_modules_to_*_prefetch` names for it."""
        self._last = live
        for state in live.fsdp.prefetches(self.direction):
            target = None if live.root is None else live.root.groups.get(state)
            if target is not None and target not in self._gathered:
                prefetch(target)

    def free_inputs(self, cap: int | None) -> None:
        """Let the oldest reductions finish, so that one more keeps the user's cap of buffers."""
        if cap is None:
            return
        busy = [w for w in self._in_flight if isinstance(w, Reduction) and w.holds_input]
        for reduction in busy[: len(busy) + 1 - cap]:
            reduction.drain()

    def mark(self, index: int) -> None:
        """Stretch `index` of the emitted code begins."""
        if self.watch is not None:
            self.watch.mark(index)

    def track(self, work: Gather | Reduction) -> None:
        self._in_flight.append(work)
        if self.watch is not None and work.work is not None:
            work.work = self.watch.watch(work.work)

    def abort(self) -> None:
        """Drain what was issued and drop what was gathered; gradients of this run are lost."""
        for work in self._in_flight:
            work.drain()
        for live in self._groups:
            live.drop()
            gradients.forget(live.fsdp)


class OpenGroup:
    """A group within a run."""

    __slots__ = ("_live", "_run")

    def __init__(self, run: Run, live: LiveGroup) -> None:
        self._run = run
        self._live = live

    def issue_gather(self, *dtypes: torch.dtype) -> GatherStep:
        """Start the all-gather. dtypes: one for all parameters, or one for each.

        Where the user named what to prefetch, nothing else is issued ahead of its wait.
        """
        wanted = dtypes if len(dtypes) > 1 else dtypes * len(self._live.fsdp.params)
        step = GatherStep(self._run, self._live, wanted)
        if self._run.may_issue(self._live):
            step.issue()
        return step

    def issue_reduce(
        self,
        grads: list[Tensor],
        indices: tuple[int, ...],
        *,
        tangents: tuple[int, ...] = (),
        layouts: tuple[int, ...] = (),
    ) -> Reduction:
        """Start the reduce-scatter of the gradients of parameters `indices`.

        tangents: for each gradient, the bit mask of the tangents it depends on; a gradient of
        which all tangents are missing does not exist in eager (None), so it is left out.
        layouts: for each gradient, the DTensor layout of which it is the local part, or -1.
        """
        if layouts:
            pairs = zip(grads, layouts, strict=True)
            grads = [g if layout < 0 else as_dtensor(g, layout) for g, layout in pairs]
        live, defined = self._live, self._run.defined
        reducible: dict[int, Tensor] = {}
        if will_execute(live.accumulate_node):  # not for torch.autograd.grad(loss, inputs)
            masks = tangents or (ALL_DEFINED,) * len(indices)
            rows = zip(indices, grads, masks, strict=True)
            reducible = collect(live, {i: g for i, g, mask in rows if mask & defined})
        finish_later(live)
        self._run.free_inputs(live.fsdp.reduce_input_cap)
        reduction = Reduction(live, reducible)
        self._run.track(reduction)
        return reduction


def collect(live: LiveGroup, grads: dict[int, Tensor]) -> dict[int, Tensor]:
    """What is to be reduced now that `grads` have come: nothing while more is to come."""
    params = live.fsdp.params
    grads = {index: params[index].as_autograd_gives(grad) for index, grad in grads.items()}
    grads = merge(live.arrived, grads)
    if more_calls_ahead(live):
        live.arrived = grads
        return {}
    live.arrived = {}
    if live.fsdp.reduces:
        return merge_unreduced(live.fsdp, grads)
    keep_unreduced(live, grads)
    return {}


class GatherStep:
    """A gather within a run."""

    __slots__ = ("_dtypes", "_issued", "_live", "_run")

    def __init__(self, run: Run, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        self._run = run
        self._live = live
        self._dtypes = dtypes
        self._issued: Gather | None = None

    def issue(self) -> None:
        """Start the all-gather, or take the one that was prefetched for another group."""
        self._issued = take_prefetched(self._live, self._dtypes)
        self._run.gathered(self._live)
        self._run.track(self._issued)

    def wait(self) -> list[Tensor]:
        """The group's parameters, gathered."""
        if self._issued is None:
            self.issue()
        tensors = self._gather.wait()
        self._run.prefetch_after(self._live)
        return tensors

    @property
    def _gather(self) -> Gather:
        assert self._issued is not None
        return self._issued

    def release(self) -> None:
        """Last use is over, and nothing later in this step needs the group.

        After backward, `set_reshard_after_backward(False)` keeps it for the next micro-step.
        """
        is_backward = self._run.direction is Direction.BACKWARD
        self._gather.release(keep=is_backward and not self._live.fsdp.reshard_after_backward)

    def release_for_backward(self, *, keep: bool | None = None) -> None:
        """Last use in forward is over; backward needs the group again.

        FSDP2's `reshard_after_forward`, read now, says whether it stays gathered. keep: the plan's
        decision, which counts if the user left the setting to FSDP2.
        """
        fsdp = self._live.fsdp
        if (group := fsdp.post_forward_process_group) is not None:
            self._gather.release_to(group)
        elif keep is not None and fsdp.reshard_is_automatic:
            self._gather.release(keep=keep)
        else:
            self._gather.release(keep=not fsdp.reshard_after_forward)


@dataclass(slots=True)
class Body:
    """What one direction runs; replaced between steps, never during one.

    watched: with marks, so that each run leaves its stopwatch in `watches`.
    """

    call: Callable[[list[Any]], Any]
    watched: bool = False
    watches: list[Stopwatch] = field(default_factory=list)


def guarded(
    body: Body, direction: Direction, device: torch.device, calls: Calls | None = None
) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs `body` with a fresh `Run` as its first argument.

    After an exception nothing is in flight and nothing stays gathered.
    """

    def call(args: list[Any]) -> Any:
        run = Run(direction, ALL_DEFINED if calls is None else calls.take_mask())
        if body.watched:
            run.watch = stopwatch(device)
        args.insert(0, run)
        try:
            outputs = body.call(args)
        except BaseException:
            run.abort()
            raise
        if run.watch is not None:
            body.watches.append(run.watch)
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
