"""One execution of one direction. The emitted code calls these methods and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.errors import CollectiveFailed, DivergedRanks, cleaning_up
from graphshard.fsdp2 import gradients, is_root, reset_iteration, siblings
from graphshard.fsdp2.layouts import as_dtensor
from graphshard.runtime import host_copies
from graphshard.runtime.ahead import SentBucket, SentGroup, remember
from graphshard.runtime.arrived import collect
from graphshard.runtime.body import Body
from graphshard.runtime.buckets import AllGather
from graphshard.runtime.calls import ALL_DEFINED, Calls, more_calls_ahead, will_execute
from graphshard.runtime.doubt import drop_stale, is_doubtful
from graphshard.runtime.finish import finish_later
from graphshard.runtime.gather import Gather, issue, prefetch, take_prefetched
from graphshard.runtime.graph_order import FirstGather, Turn, turn_of
from graphshard.runtime.host_copies import HostCopy
from graphshard.runtime.issued import ended
from graphshard.runtime.live import LiveGroup, lookup
from graphshard.runtime.ranges import direction_range
from graphshard.runtime.reduce import AllReduce, Reduction
from graphshard.runtime.stopwatch import Stopwatch, stopwatch
from graphshard.runtime.waiting import CLEAN_UP_S
from graphshard.schedule.plan import Direction


@dataclass(slots=True)
class Run:
    """Opens groups and remembers what is in flight, so that an exception leaves nothing behind.

    defined: bit k is set when tangent k of this backward is not missing. exact_sums: of gradients,
    FSDP2's to the last bit. anchors: of all groups that it opens. device: where it computes.
    stopwatch: takes the times of this run, if the emitted code has marks. turn: in the order of its
    root's graphs.
    """

    direction: Direction
    defined: int = ALL_DEFINED
    exact_sums: bool = True
    anchors: tuple[Tensor, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stopwatch: Stopwatch | None = None
    turn: Turn | None = None
    groups: list[LiveGroup] = field(default_factory=list)
    _gathered: set[LiveGroup] = field(default_factory=set)
    _last: LiveGroup | None = None
    _in_flight: list[Gather | Reduction | AllReduce] = field(default_factory=list)
    _opening: list[SentBucket] = field(default_factory=list)
    _copies: list[HostCopy] = field(default_factory=list)

    def open(self, anchor: Tensor, *dtypes: torch.dtype) -> OpenGroup:
        """The group that `anchor` names, for this run.

        dtypes of its gathered parameters: one for all, or one for each.
        """
        live = lookup(anchor)
        self.groups.append(live)
        if self.direction is Direction.FORWARD:
            live.counters.forwards += 1
        return OpenGroup(self, live, dtypes)

    def issue_gather(self, *groups: OpenGroup, params: tuple[int, ...] = ()) -> GatherStep:
        """Start one all-gather of `groups`, or of parameters `params` of one group.

        Where the user named what to prefetch, nothing else is issued ahead of its wait, and each
        group travels alone.
        """
        if self.turn is not None and self._last is None:
            self.turn.begin(tuple([g.first(params) for g in groups]))
        ready = [g for g in groups if self.may_issue(g.live)]
        for bucket in [[g] for g in ready] if self._is_listed(groups) else [ready]:
            if self._last is None and self._follows_optimizer(bucket):
                self._opening.append(tuple(g.entry(params) for g in bucket))
            self.watch(issue([(g.gather(), g.places(params)) for g in bucket]))
        return GatherStep(self, params)

    def _is_listed(self, groups: tuple[OpenGroup, ...]) -> bool:
        """A prefetch list concerns an all-gather of `groups` that is issued now."""
        return any(g.live.fsdp.prefetches(self.direction) for g in groups) or bool(
            self._last is not None and self._last.fsdp.prefetches(self.direction)
        )

    def _follows_optimizer(self, groups: Sequence[OpenGroup]) -> bool:
        """`overlap_optimizer`: the next optimizer step may issue what this forward begins with."""
        return self.direction is Direction.FORWARD and any(
            g.live.root is not None and g.live.root.opening is not None for g in groups
        )

    def make_certain(self, live: LiveGroup) -> None:
        """Before a forward takes what was gathered before it began: of all its groups at once."""
        if self.direction is Direction.FORWARD and is_doubtful(live):
            drop_stale(list(dict.fromkeys(map(lookup, self.anchors))))

    def gathered(self, live: LiveGroup) -> None:
        self._gathered.add(live)

    def may_issue(self, live: LiveGroup) -> bool:
        """False for a group that an explicit prefetch list leaves out."""
        named = self._last.fsdp.prefetches(self.direction) if self._last is not None else ()
        return not named or live.fsdp.state in named

    def prefetch_after(self, live: LiveGroup) -> None:
        """`live` is gathered: issue what `set_modules_to_*_prefetch` names for it."""
        if self._opening:
            remember(self._opening)
            self._opening = []
        self._last = live
        for target in () if live.root is None else live.root.to_prefetch(live, self.direction):
            if target not in self._gathered:
                self.make_certain(target)
                prefetch(target)

    def free_inputs(self, cap: int | None) -> None:
        """Let the oldest reductions finish, so that one more keeps the user's cap of buffers."""
        if cap is None:
            return
        busy = [w for w in self._in_flight if isinstance(w, Reduction) and w.holds_input]
        for reduction in busy[: len(busy) + 1 - cap]:
            reduction.drain()

    def issue_all_reduce(self, reduced: Reduction) -> AllReduce:
        """Start to add up over the replicas what `reduced` has, which was waited for."""
        turn = None if reduced.is_read_early else self.turn
        puts_off = None if turn is None else turn.puts_off_all_reduce
        all_reduce = AllReduce(reduced, puts_off=puts_off)
        self.track(all_reduce)
        self.watch([all_reduce])
        return all_reduce

    def issue_offload(self, anchor: Tensor | None, tensors: Sequence[Tensor]) -> HostCopy:
        """Start to copy activations of the group that `anchor` names to the host."""
        return self._started(host_copies.offload(self.device, tensors, _fqn(anchor)))

    def issue_reload(self, anchor: Tensor | None, tensors: Sequence[Tensor]) -> HostCopy:
        """Start to copy what the host holds of them back."""
        return self._started(host_copies.reload(self.device, tensors, _fqn(anchor)))

    def _started(self, copy: HostCopy) -> HostCopy:
        self._copies.append(copy)
        self.watch([copy])
        return copy

    def mark(self, index: int) -> None:
        """Segment `index` of the emitted code begins."""
        if self.stopwatch is not None:
            self.stopwatch.mark(index)

    def watch(self, issued: Sequence[AllGather | Reduction | AllReduce | HostCopy]) -> None:
        """Time what the segment of now has issued."""
        if self.stopwatch is None:
            return
        for one in issued:
            if one.work is not None:
                one.work = self.stopwatch.watch(one.work)

    def track(self, work: Gather | Reduction | AllReduce) -> None:
        self._in_flight.append(work)

    def abort(self, error: BaseException) -> None:
        """Drop what was issued and what was gathered; gradients of this run are lost.

        Nothing is waited for where other ranks will never take part in what was issued, and not
        much longer than CLEAN_UP_S anywhere: the backend keeps the memory of what goes on.
        """
        is_final = isinstance(error, (DivergedRanks, CollectiveFailed))
        ends = time.monotonic() + (0 if is_final else CLEAN_UP_S)
        for work in self._in_flight:
            left_s = ends - time.monotonic()
            if left_s > 0:
                with cleaning_up(error):
                    work.drop(limit_s=left_s)
        for copy in self._copies:
            with cleaning_up(error):
                copy.drop()
        if self.turn is not None:
            with cleaning_up(error):
                self.turn.order.give_up(limit_s=max(ends - time.monotonic(), 0))
        for live in self.groups:
            with cleaning_up(error):
                live.drop(limit_s=max(ends - time.monotonic(), 0))
            gradients.forget(live.fsdp)
        if is_final:
            self._reset_roots(error)

    def _reset_roots(self, error: BaseException) -> None:
        """No step of these models can go on: all their groups are SHARDED."""
        for root in dict.fromkeys(live.root for live in self.groups if live.root is not None):
            with cleaning_up(error):
                reset_iteration(siblings(root.groups[0].fsdp.state), waits=False)
                root.arrive_on_host()
            for live in root.groups:
                live.drop(limit_s=0)
                live.fsdp.reshard()


def _fqn(anchor: Tensor | None) -> str:
    """Of the group that `anchor` names, for profiles; its graph may not have one."""
    return "" if anchor is None else lookup(anchor).fqn


class OpenGroup:
    """A group within a run."""

    __slots__ = ("_dtypes", "_gather", "_run", "live")

    def __init__(self, run: Run, live: LiveGroup, dtypes: tuple[torch.dtype, ...]) -> None:
        self._run = run
        self.live = live
        self._dtypes = dtypes if len(dtypes) > 1 else dtypes * len(live.fsdp.params)
        self._gather: Gather | None = None

    def gather(self) -> Gather:
        """This run's gather of the group, or the one that was prefetched for it."""
        if self._gather is None:
            self._run.make_certain(self.live)
            self._gather = take_prefetched(self.live, self._dtypes)
            self._run.gathered(self.live)
            self._run.track(self._gather)
        return self._gather

    def places(self, params: tuple[int, ...]) -> tuple[int, ...]:
        return params or self.live.places

    def first(self, params: tuple[int, ...]) -> FirstGather:
        """What a gather of `params` is about, for the graph before this one to issue it."""
        return FirstGather(self.live, self._dtypes, self.places(params))

    def entry(self, params: tuple[int, ...]) -> SentGroup:
        """What a gather of `params` sends, for the next optimizer step to send again."""
        live = self.live
        return SentGroup(live, self._dtypes, self.places(params), live.fsdp.versions())

    def release(
        self,
        *,
        between_micro_steps: bool = False,
        before_backward: bool = False,
        final: bool = False,
    ) -> None:
        """Last use is over, and nothing later in this step needs the group.

        After forward, a group that the user wants to stay gathered does, unless resharding is for
        the plan to decide (`final`): another forward may come next, of a pipeline or an evaluation.
        Without a backward to come (`before_backward`) it is checked then.

        After backward, `set_reshard_after_backward(False)` keeps it for the next micro-step. So
        does the plan (`between_micro_steps`) as long as gradients are not synchronised: then
        another one comes before the parameters change. Of several calls in one loss, FSDP2 ends the
        root's backward with the last: what was kept for it stays until then.
        """
        fsdp, gather = self.live.fsdp, self.gather()
        if self._run.direction is Direction.FORWARD:
            is_asked = not (fsdp.reshard_after_forward or fsdp.reshard_is_automatic)
            gather.release(keep=is_asked and not final, to_check=not before_backward)
            return
        stays = not fsdp.reshard_after_backward
        goes_on = gather.was_kept and is_root(fsdp.state) and more_calls_ahead(self.live)
        planned = between_micro_steps and not fsdp.reduces
        gather.release(keep=stays or goes_on or planned, to_check=planned and not stays)

    def release_for_backward(
        self, *, keep: bool | None = None, on_node: bool = False, final: bool = False
    ) -> None:
        """Last use in forward is over; backward needs the group again.

        FSDP2's `reshard_after_forward`, read now, says whether it stays gathered. keep, on_node:
        the plan's decision (the ranks of each node hold a shard), which counts if the user left the
        setting to FSDP2, or if it is `final`.
        """
        fsdp, node_group = self.live.fsdp, self.live.node_group
        if (group := fsdp.post_forward_process_group) is not None:
            self.gather().release_to(group)
        elif keep is not None and (final or fsdp.reshard_is_automatic):
            if on_node and node_group is not None:
                self.gather().release_to(node_group, to_check=True)
                return
            self.gather().release(keep=keep, to_check=keep and fsdp.reshard_after_forward)
        else:
            self.gather().release(keep=not fsdp.reshard_after_forward)

    def issue_reduce(
        self,
        grads: list[Tensor],
        indices: tuple[int, ...],
        *,
        tangents: tuple[int, ...] = (),
        layouts: tuple[int, ...] = (),
        part: tuple[int, ...] = (),
    ) -> Reduction:
        """Start the reduce-scatter of the gradients of parameters `indices`.

        tangents: for each gradient, the bit mask of the tangents it depends on; a gradient of
        which all tangents are missing does not exist in eager (None), so it is left out.
        layouts: for each gradient, the DTensor layout of which it is the local part, or -1.
        part: the parameters that this reduction is about, where a group has several.
        """
        if layouts:
            pairs = zip(grads, layouts, strict=True)
            grads = [g if layout < 0 else as_dtensor(g, layout) for g, layout in pairs]
        live, defined = self.live, self._run.defined
        reducible: Mapping[int, Tensor] = {}
        if will_execute(live.accumulate_node):  # not for torch.autograd.grad(loss, inputs)
            arriving = dict(zip(indices, grads, strict=True))
            if defined != ALL_DEFINED and tangents:
                masks = zip(indices, tangents, strict=True)
                arriving = {i: arriving[i] for i, mask in masks if mask & defined}
            reducible = collect(live, arriving, part)
        finish_later(live)
        turn = self._run.turn
        if turn is not None:
            turn.reduces()
        self._run.free_inputs(live.fsdp.reduce_input_cap)
        reduction = Reduction(
            live,
            reducible,
            part,
            exact_sums=self._run.exact_sums,
            puts_off=None if turn is None else turn.puts_off,
        )
        self._run.track(reduction)
        self._run.watch([reduction])
        return reduction


@dataclass(frozen=True, slots=True)
class GatherStep:
    """One all-gather of the plan. `params`: what of its group travels in it; empty: everything."""

    _run: Run
    _params: tuple[int, ...]

    def wait(self, group: OpenGroup) -> Mapping[int, Tensor]:
        """Gathered parameters of `group` by index: all that travel in this gather."""
        gather, places = group.gather(), group.places(self._params)
        if gather.missing:  # a prefetch list held it back
            issue([(gather, places)])
        tensors = gather.wait(places)
        self._run.prefetch_after(group.live)
        if self._run.turn is not None:
            self._run.turn.waited(self._run.groups)
        return tensors


def guarded(
    pick: Callable[[LiveGroup | None], Body],
    direction: Direction,
    device: torch.device,
    anchors: tuple[int, ...],
    calls: Calls | None = None,
) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs a body with a fresh `Run` as its first argument.

    pick: gives the body for a call to which a group belongs, that of the first anchor. anchors:
    their places among the inputs, those of all groups that the body opens.

    After an exception nothing is in flight and nothing stays gathered.
    """

    def call(args: list[Any]) -> Any:
        own = tuple([args[place] for place in anchors])
        first = lookup(own[0]) if own else None
        body = pick(first)
        defined = ALL_DEFINED if calls is None else calls.take_mask()
        run = Run(direction, defined, body.exact_sums, own, device)
        if first is not None:
            run.turn = turn_of(direction, first, len(own), overlaps=body.overlaps)
        if body.watched:
            run.stopwatch = stopwatch(device)
        args.insert(0, run)
        try:
            with direction_range(direction):
                outputs = body.call(args)
            ended(run.groups, is_backward=direction is Direction.BACKWARD)
            if run.turn is not None:
                run.turn.leave()
        except BaseException as error:
            run.abort(error)
            raise
        if run.stopwatch is not None:
            body.watches.append(run.stopwatch)
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
