"""Costs of a model with tensor parallel: from a few of its blocks, with numbers for its sizes.

In: a function that builds the model with so many blocks of each list as are captured, and the
groups of all blocks. Out: what a step of the whole model costs, as a `Study` says it. A study
captures sizes as symbols, with which torch propagates the layouts of DTensors anew for each op:
that takes several times as long as a capture with numbers, of which there is one for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from graphshard.capture.interpreter import no_collections
from graphshard.errors import CaptureError
from graphshard.offline.capture import capture
from graphshard.offline.clock import Clock
from graphshard.offline.counted import CostsKey, costs_key, counted_costs
from graphshard.offline.cuts import Cuts
from graphshard.offline.point import Point
from graphshard.offline.repeats import Repeat
from graphshard.offline.target import Sizes
from graphshard.offline.world import Made, faked, pretended, shapes
from graphshard.pricing.op_costs import GraphCosts
from graphshard.schedule.plan import GroupInfo


@dataclass(slots=True)
class ShortStudy:
    """build: see above; it is called in a world of `world_size`. repeats: lists of alike blocks, of
    which the first few are there. infos: the groups of all blocks. known: costs, once asked for.
    """

    name: str
    build: Callable[[Sizes], Made]
    world_size: int
    repeats: Sequence[Repeat]
    infos: Sequence[GroupInfo]
    known: dict[CostsKey, GraphCosts] = field(default_factory=dict)
    _cuts: Cuts = field(default_factory=lambda: Cuts(Clock()))

    def costs(self, point: Point, *, freed: bool = False) -> GraphCosts:
        """Of all blocks; freed: with the user's checkpoints replaced (see `may_free`).

        Raises CaptureError (GS910) if the model cannot be captured, or if the captured blocks do
        not stand for all; and what `build` raises.
        """
        key = costs_key(point, freed=freed)
        if key not in self.known:
            self._capture(point)
            with no_collections():
                found = counted_costs(self._cuts, self.repeats, self.infos, point, freed=freed)
            if found is None:
                raise CaptureError("GS910", f"blocks of {self.name} do not repeat exactly")
            self.known[key] = found
        return self.known[key]

    def may_free(self, point: Point) -> bool:
        """As `Study.may_free`."""
        self._capture(point)
        return self._cuts.may_free(point)

    def _capture(self, point: Point) -> None:
        key = point.fused, point.sizes
        if key not in self._cuts.captures:
            with no_collections(), pretended(self.world_size):
                fake = faked(partial(self.build, point.sizes))
                self._cuts.shapes[point.sizes] = shapes(fake)
                self._cuts.captures[key] = capture(fake, self.name, fused=point.fused)
