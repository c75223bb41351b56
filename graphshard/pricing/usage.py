"""What the planner knows of one direction: when each group is used, in compute order."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.schedule.plan import Direction


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Compute ops `first` to `last` (inclusive) read the gathered parameters of `group`.

    `last` is None when the graph hands a gathered parameter to its caller: no release.
    """

    group: int
    first: int
    last: int | None


@dataclass(frozen=True, slots=True)
class ParamUse:
    """Compute ops `first` to `last` (inclusive) read parameter `param` of `group`; see GroupUse."""

    group: int
    param: int
    first: int
    last: int | None


@dataclass(frozen=True, slots=True)
class GradReady:
    """The gradients of `group` are complete after compute op `after` (-1: before the first).

    comes: (parameter, the compute op that its gradient comes with, moved to a cut if code is
    compiled). made: (parameter, the compute op that makes the memory of its gradient).
    """

    group: int
    after: int
    comes: tuple[tuple[int, int], ...] = ()
    made: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """One direction: `num_ops` compute ops in a fixed order, uses and reductions of groups.

    `kept`: groups that stay gathered from forward to backward, by FSDP2's settings. regions: where
    compiled code is cut, if it is (see `graphshard.pricing.region_cuts`); uses and reductions are
    then at cuts.
    """

    direction: Direction
    num_ops: int
    uses: tuple[GroupUse, ...]
    reductions: tuple[GradReady, ...]
    kept: frozenset[int] = frozenset()
    params: tuple[ParamUse, ...] = ()
    regions: tuple[int, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ops before which a group is needed, released or reduced; the first and the end too.

        What lies between two of them runs without communication.
        """
        if self.regions:
            return self.regions
        needed = {use.first for use in self.uses}
        last = {use.last + 1 for use in self.uses if use.last is not None}
        ready = {reduction.after + 1 for reduction in self.reductions}
        return tuple(sorted({0, self.num_ops, *needed, *last, *ready}))
