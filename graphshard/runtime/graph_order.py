"""The order in which the graphs of one FSDP root run, and what goes on from one to the next.

A graph break cuts a model into graphs; each begins with an all-gather that nothing hides, and its
backward ends with a reduce-scatter. In: the runs of one call of the model, or of one backward, as
they begin and end. Afterwards the first all-gather of the graph that comes next is on its way while
the last group of this one computes, and what this one reduces last is on its way while the next one
computes. As in FSDP2's backward one group is gathered ahead, and one is being reduced, until
another one is to be. All-reduces over replicas go on until the end of the backward.

What comes next is learned: it is issued ahead once it has been the same twice. What was issued for
a graph that did not come is thrown away when another one has run, and when the call or the backward
ends. In a selective checkpoint that Dynamo does not trace each graph issues its own: the checkpoint
has to see the same ops when it calls the graph again.

Assumed: all ranks run graphs of the same groups in the same order, as eager FSDP2 needs it too
(`graphshard.runtime.issued` compares what they issue), and runs of one key gather and reduce as
often as the last one of it; where the ranks have changed plans together since, one run overlaps
less, on all of them. Who changes a shard between two graphs of one forward without a count (through
`.data`, say) calls `reshard()`. And nobody reads a `.grad` before the backward is over, but hooks
of that parameter; a backward that fails loses what was put off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode

from graphshard.runtime.calls import current_task
from graphshard.runtime.gather import Gather, issue
from graphshard.runtime.live import LiveGroup, Root
from graphshard.runtime.reduce import AllReduce, Reduction
from graphshard.schedule.plan import Direction

# Runs with as many groups, of which the first one is the same, are taken for runs of one graph.
RunKey: TypeAlias = tuple[Direction, LiveGroup, int]


@dataclass(frozen=True, slots=True)
class FirstGather:
    """What one group has in the all-gather that a graph begins with."""

    live: LiveGroup
    dtypes: tuple[torch.dtype, ...]
    places: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Gathered."""
        fsdp = self.live.fsdp
        elements = [(fsdp.params[i].sent_numel, self.dtypes[i].itemsize) for i in self.places]
        return sum(numel * item for numel, item in elements) * fsdp.world_size


FirstBucket: TypeAlias = tuple[FirstGather, ...]


@dataclass(slots=True)
class _Following:
    """What the graph that came next began with. is_sure: twice in a row."""

    bucket: FirstBucket
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Issued at the end of the run `after`."""

    after: RunKey
    live: LiveGroup
    gather: Gather

    @property
    def is_taken(self) -> bool:
        return self.live.prefetched is not self.gather


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one run of a graph: waits for all-gathers, and reductions."""

    waits: int
    reductions: int


@dataclass(slots=True, eq=False)
class GraphOrder:
    """Of one root. num_ahead: groups that were gathered ahead for another graph, and used.
    num_put_off: reductions and all-reduces that another graph, or the end of a backward, has waited
    for."""

    num_ahead: int = 0
    num_put_off: int = 0
    _largest_bytes: int = 0  # once it is known
    _depth: int = 0  # of calls of the model, and of modules in it
    _task: int = -1  # the backward that is running, or -1
    _last: RunKey | None = None
    _following: dict[RunKey, _Following] = field(default_factory=dict)
    # Not with the code that runs: one rank alone may compile another, for lengths of its own.
    _counts: dict[RunKey, Counts] = field(default_factory=dict)
    _followed: set[RunKey] = field(default_factory=set)
    _ahead: list[_Ahead] = field(default_factory=list)
    _due: list[_Ahead] = field(default_factory=list)  # for the run that is running
    _put_off: dict[int, list[Reduction]] = field(default_factory=dict)  # of a backward: one group's
    _all_reduces: dict[int, list[AllReduce]] = field(default_factory=dict)  # of a backward

    @property
    def num_expected(self) -> int:
        """Runs of graphs for which the run before them gathers, as far as memory allows."""
        return sum(following.is_sure for following in self._following.values())

    # -- calls and backwards -----------------------------------------------------------------------

    def open(self) -> None:
        """A call of the model begins, or one within it."""
        if current_task() < 0:
            if self._depth == 0:
                self._restart(-1)
            self._depth += 1

    def close(self) -> None:
        """It is over."""
        if current_task() < 0:
            self._depth -= 1
            if self._depth == 0:
                self._restart(-1)

    def skip(self) -> None:
        """A run of which nothing is known comes between the one before and the one after it."""
        self._restart(self._task)

    def end_backward(self, task: int) -> None:
        """All of it has run well."""
        self.complete(task)
        all_reduces = self._all_reduces.get(task, [])
        while all_reduces:
            all_reduces.pop(0).complete()
        self._all_reduces.pop(task, None)
        self._restart(-1)

    def _restart(self, task: int) -> None:
        self._task, self._last = task, None
        self._drop(self._due)
        self._drop(self._ahead)

    def _drop(self, issued: list[_Ahead]) -> None:
        """Throw away what nobody has taken, and do not expect it again."""
        while issued:
            one = issued.pop()
            if one.is_taken:
                self.num_ahead += 1
                continue
            one.live.prefetched = None
            self._following.pop(one.after, None)
            one.gather.drop()

    # -- runs --------------------------------------------------------------------------------------

    def enter(self, direction: Direction) -> bool:
        """A run begins. False if it is none of one call or of one backward."""
        task = current_task()
        if direction is Direction.BACKWARD and task != self._task:
            self._restart(task)
        if task < 0 and (self._put_off or self._all_reduces):
            self.give_up()
        is_known = task >= 0 if direction is Direction.BACKWARD else task < 0 < self._depth
        if is_known:
            self._drop(self._due)
            self._due, self._ahead = self._ahead, []
        return is_known

    def begin(self, bucket: FirstBucket) -> None:
        """The run that has begun needs `bucket` first."""
        if self._last is not None:
            known = self._following.get(self._last)
            is_sure = known is not None and known.bucket == bucket
            self._following[self._last] = _Following(bucket, is_sure)

    def look_ahead(self, key: RunKey, busy: Iterable[LiveGroup]) -> None:
        """The run `key`, which uses `busy`, has all that it gathers: issue what comes next."""
        following = self._following.get(key)
        if following is None or not self._may_issue(key, following, busy):
            return
        wanted = []
        for first in following.bucket:
            gather = first.live.prefetched = Gather.begin(first.live, first.dtypes)
            self._ahead.append(_Ahead(key, first.live, gather))
            wanted.append((gather, first.places))
        issue(wanted)

    def counts_of(self, key: RunKey) -> Counts | None:
        """What the last run of `key` had."""
        return self._counts.get(key)

    def leave(self, key: RunKey, counts: Counts) -> None:
        """It is over; this is what there was."""
        self._counts[key] = counts
        if self._last is not None:
            self._followed.add(self._last)
        self._last = key
        self._drop(self._due)

    def is_followed(self, key: RunKey) -> bool:
        """Another run came next, at least once."""
        return key in self._followed

    def put_off(self, reduction: Reduction) -> None:
        """The next run that reduces, or the end of this backward, completes it."""
        task = current_task()
        if any(one.live is not reduction.live for one in self._put_off.get(task, ())):
            self.complete(task)
        self._put_off.setdefault(task, []).append(reduction)
        self.num_put_off += 1

    def put_off_all_reduce(self, all_reduce: AllReduce) -> None:
        """The end of this backward completes it, as in FSDP2."""
        self._all_reduces.setdefault(current_task(), []).append(all_reduce)
        self.num_put_off += 1

    def complete(self, task: int) -> None:
        """What was put off in this backward, and not in one around it. All-reduces that follow go
        on until it ends."""
        put_off = self._put_off.get(task, [])
        while put_off:
            reduction = put_off.pop(0)
            all_reduce = reduction.go_on()
            if reduction.is_read_early:
                all_reduce.complete()
            elif all_reduce.is_under_way:
                self._all_reduces.setdefault(task, []).append(all_reduce)
        self._put_off.pop(task, None)

    def give_up(self, *, limit_s: float | None = None) -> None:
        """A backward has failed. Waits `limit_s` for what was put off, 0: not at all."""
        for put_off in (self._put_off, self._all_reduces):
            while put_off:
                for one in put_off.popitem()[1]:
                    if limit_s != 0:
                        one.drop(limit_s=limit_s)

    def _may_issue(self, key: RunKey, following: _Following, busy: Iterable[LiveGroup]) -> bool:
        """All ranks answer alike: sizes, settings and writes that count are the same on them."""
        direction, first, _ = key
        lives = [one.live for one in following.bucket]
        if not following.is_sure or not set(lives).isdisjoint(busy):
            return False
        if first.root is None or first.fsdp.prefetches(direction):
            return False
        if sum(one.size_bytes for one in following.bucket) > self._most_ahead_bytes(first.root):
            return False
        return all(live.root is first.root and _is_free(live, self._task) for live in lives)

    def _most_ahead_bytes(self, root: Root) -> int:
        """Of the largest group: so much FSDP2 itself gathers ahead. Sharding fixes it."""
        if not self._largest_bytes:
            sizes = (FirstGather(one, one.dtypes, one.places).size_bytes for one in root.groups)
            self._largest_bytes = max(sizes)
        return self._largest_bytes

    def forget(self, live: LiveGroup) -> None:
        """It was resharded: what was gathered ahead of it may be of values of before."""
        for one in [*self._ahead, *self._due]:
            if one.live is live and not one.is_taken:
                live.prefetched = None
                one.gather.drop()


@dataclass(slots=True, eq=False)
class Turn:
    """One run in its order. expects: what there will be; None if nobody knows, or if nothing of
    another graph may be held beside what this one holds."""

    order: GraphOrder
    key: RunKey
    expects: Counts | None
    _waits: int = 0
    _reductions: int = 0
    _has_begun: bool = False

    def begin(self, bucket: FirstBucket) -> None:
        """The run issues an all-gather of `bucket`, its first one or a later one."""
        if not self._has_begun:
            self._has_begun = True
            self.order.begin(bucket)

    def waited(self, busy: Iterable[LiveGroup]) -> None:
        """For an all-gather. busy: groups of this run."""
        self._waits += 1
        if self.expects is not None and self._waits == self.expects.waits:
            self.order.look_ahead(self.key, busy)

    def reduces(self) -> None:
        """It is about to issue a reduction."""
        self.order.complete(current_task())
        self._reductions += 1

    def puts_off(self, reduction: Reduction) -> bool:
        """It would wait for `reduction` now: False if it has to, since it is to issue others, or
        nothing comes next."""
        if self.expects is None or self._reductions != self.expects.reductions:
            return False
        if not self.order.is_followed(self.key):
            return False
        self.order.put_off(reduction)
        return True

    def puts_off_all_reduce(self, all_reduce: AllReduce) -> bool:
        """The same for an all-reduce: another run comes, so that something hides it."""
        if self.expects is None or not self.order.is_followed(self.key):
            return False
        self.order.put_off_all_reduce(all_reduce)
        return True

    def leave(self) -> None:
        """It is over."""
        self.order.leave(self.key, Counts(self._waits, self._reductions))


def turn_of(
    direction: Direction, first: LiveGroup, num_groups: int, *, overlaps: bool
) -> Turn | None:
    """Of a run that begins, with `num_groups` groups; None if nothing is known of its order.

    overlaps: beside what it holds, something of another graph may be under way.
    """
    order = None if first.root is None else first.root.order
    if order is None or not order.enter(direction):
        return None
    if _in_selective_checkpoint():
        order.skip()
        return None
    key = direction, first, num_groups
    return Turn(order, key, order.counts_of(key) if overlaps else None)


def _in_selective_checkpoint() -> bool:
    """A selective checkpoint notes the ops that run."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CachingTorchDispatchMode) for mode in modes)


def _is_free(live: LiveGroup, task: int) -> bool:
    """Nothing of it is gathered, and in a backward it will be asked for."""
    is_here = live.kept is not None or live.prefetched is not None or not live.fsdp.is_sharded
    return not is_here and (task < 0 or any(call.is_ahead(task) for call in live.calls))
