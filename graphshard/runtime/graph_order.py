"""The order in which the graphs of one FSDP root run, and what is gathered ahead because of it.

A graph break cuts a model into graphs, and each begins with an all-gather that nothing hides. In:
the runs of one call of the model, or of one backward, as they begin and end. Afterwards the first
all-gather of the graph that comes next is on its way while the last group of this one computes,
one group ahead, as in FSDP2's backward.

What comes next is learned: it is issued ahead once it has been the same twice. What was issued for
a graph that did not come is thrown away when another one has run, and when the call or the backward
ends.

Assumed: all ranks run graphs of the same groups in the same order, as eager FSDP2 needs it too
(`graphshard.runtime.issued` compares what they issue). And who changes a shard between two graphs
of one forward without a count (through `.data`, say) calls `reshard()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from graphshard.runtime.calls import current_task
from graphshard.runtime.gather import Gather, issue
from graphshard.runtime.live import LiveGroup, Root
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
        elements = [(fsdp.params[i].padded_numel, self.dtypes[i].itemsize) for i in self.places]
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


@dataclass(slots=True, eq=False)
class GraphOrder:
    """Of one root. num_ahead: groups that were gathered ahead for another graph, and used."""

    num_ahead: int = 0
    _depth: int = 0  # of calls of the model, and of modules in it
    _task: int = -1  # the backward that is running, or -1
    _last: RunKey | None = None
    _following: dict[RunKey, _Following] = field(default_factory=dict)
    _ahead: list[_Ahead] = field(default_factory=list)
    _due: list[_Ahead] = field(default_factory=list)  # for the run that is running

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

    def end_backward(self) -> None:
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

    def leave(self, key: RunKey) -> None:
        """It is over."""
        self._last = key
        self._drop(self._due)

    def _may_issue(self, key: RunKey, following: _Following, busy: Iterable[LiveGroup]) -> bool:
        """All ranks answer alike: sizes, settings and writes that count are the same on them."""
        direction, first, _ = key
        lives = [one.live for one in following.bucket]
        if not following.is_sure or not set(lives).isdisjoint(busy):
            return False
        if first.root is None or first.fsdp.prefetches(direction):
            return False
        if sum(one.size_bytes for one in following.bucket) > _largest_bytes(first.root):
            return False
        return all(live.root is first.root and _is_free(live, self._task) for live in lives)

    def forget(self, live: LiveGroup) -> None:
        """It was resharded: what was gathered ahead of it may be of values of before."""
        for one in [*self._ahead, *self._due]:
            if one.live is live and not one.is_taken:
                live.prefetched = None
                one.gather.drop()


@dataclass(slots=True, eq=False)
class Turn:
    """One run in its order. expects: so many waits for all-gathers; -1 if nobody knows, or if
    nothing may be gathered ahead beside what it holds."""

    order: GraphOrder
    key: RunKey
    expects: int
    num_waits: int = 0
    _has_begun: bool = False

    def begin(self, bucket: FirstBucket) -> None:
        """The run issues an all-gather of `bucket`, its first one or a later one."""
        if not self._has_begun:
            self._has_begun = True
            self.order.begin(bucket)

    def waited(self, busy: Iterable[LiveGroup]) -> None:
        """For an all-gather. busy: groups of this run."""
        self.num_waits += 1
        if self.num_waits == self.expects:
            self.order.look_ahead(self.key, busy)


def turn_of(direction: Direction, first: LiveGroup, num_groups: int, expects: int) -> Turn | None:
    """Of a run that begins, with `num_groups` groups; None if nothing is known of its order."""
    order = None if first.root is None else first.root.order
    if order is None or not order.enter(direction):
        return None
    return Turn(order, (direction, first, num_groups), expects)


def _is_free(live: LiveGroup, task: int) -> bool:
    """Nothing of it is gathered, and in a backward it will be asked for."""
    is_here = live.kept is not None or live.prefetched is not None or not live.fsdp.is_sharded
    return not is_here and (task < 0 or any(call.is_ahead(task) for call in live.calls))


def _largest_bytes(root: Root) -> int:
    """Of the largest group: so much FSDP2 itself gathers ahead."""
    groups = root.groups.values()
    return max(FirstGather(live, live.dtypes, live.places).size_bytes for live in groups)
