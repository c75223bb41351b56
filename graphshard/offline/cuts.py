"""What was captured of a model, cut in two: each capture once in each way that is asked for.

In: captures, with the sizes that stand in them as symbols. Out: partitions with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from graphshard.compiler.partition import JointGraph, Partition, parts_of, released, repeating
from graphshard.graph.program import copy_of
from graphshard.offline.capture import Captured
from graphshard.offline.clock import Clock
from graphshard.offline.concrete import concrete
from graphshard.offline.point import Point
from graphshard.offline.target import Sizes
from graphshard.offline.world import Shapes
from graphshard.pricing.recompute import NO_UNITS, ChosenUnits

# fused, sizes (None: of all, as symbols).
CaptureKey: TypeAlias = tuple[bool, Sizes | None]
# What is computed again besides or offloaded, fused, freed.
CutKey: TypeAlias = tuple[ChosenUnits, bool, bool]


@dataclass(slots=True)
class Cuts:
    """captures: one for each way to price compute and all sizes, or each. shapes: of the inputs,
    for each of the sizes. clock: is told the time of the passes."""

    clock: Clock
    captures: dict[CaptureKey, Captured] = field(default_factory=dict)
    shapes: dict[Sizes, Shapes] = field(default_factory=dict)
    _free: dict[int, JointGraph | None] = field(default_factory=dict)
    _parts: dict[tuple[Sizes, CutKey], Partition] = field(default_factory=dict)
    _cuts: dict[tuple[int, CutKey], Partition] = field(default_factory=dict)

    def forget_captures(self) -> None:
        """And all that was made of them."""
        for known in (self.captures, self._free, self._parts, self._cuts):
            known.clear()

    def joint_graph(self, captured: Captured, *, freed: bool) -> JointGraph | None:
        if not freed:
            return captured.joint_graph
        if id(captured) not in self._free:
            self._free[id(captured)] = released(captured.joint_graph)
        return self._free[id(captured)]

    def may_free(self, point: Point) -> bool:
        """The user's checkpoints may be replaced, and there are some; once it was captured."""
        if not point.policy.replaces_checkpoints:
            return False
        captured = self.capture_of(point.sizes, fused=point.fused)
        return self.joint_graph(captured, freed=True) is not None

    def capture_of(self, sizes: Sizes, *, fused: bool) -> Captured:
        return self.captures[fused, None if (fused, None) in self.captures else sizes]

    def cut(self, sizes: Sizes, key: CutKey) -> Partition:
        if (sizes, key) not in self._parts:
            captured = self.capture_of(sizes, fused=key[1])
            own = self.shapes[sizes]
            numbers = {name: own[at.leaf][at.dim] for at, name in captured.symbols.items()}
            with self.clock.timed("passes"):
                parts = self._partition(captured, key)
                placed = concrete(parts.placed, numbers)
            self._parts[sizes, key] = replace(parts, placed=placed)
        return self._parts[sizes, key]

    def _partition(self, captured: Captured, key: CutKey) -> Partition:
        if (id(captured), key) not in self._cuts:
            chosen, fused, freed = key
            joint_graph = self.joint_graph(captured, freed=freed)
            assert joint_graph is not None
            joint = joint_graph.program.joint
            assert joint is not None
            if chosen != NO_UNITS:
                first = self._partition(captured, (NO_UNITS, fused, freed))
                parts = repeating(joint_graph, joint, first, chosen, fused=fused)
            else:
                parts = parts_of(joint_graph, copy_of(joint), fused=fused)
            self._cuts[id(captured), key] = parts
        return self._cuts[id(captured), key]
