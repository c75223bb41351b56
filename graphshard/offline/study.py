"""Plans of one model on several worlds, machines, budgets and input sizes, from few captures.

In: a function that builds the sharded model and its inputs, and the points to plan for. Out: one
answer per point. Input sizes that differ between the points are captured as symbols; a model that
insists on numbers is captured once for each of its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from torch import nn

from graphshard.cost.machine import Machine
from graphshard.draft import Parts, decide, parts_of
from graphshard.errors import InfeasibleBudget, OfflineError
from graphshard.fsdp2.describe import describe, name_of
from graphshard.fsdp2.group import FsdpGroup, fsdp_groups
from graphshard.fsdp2.settings import GroupSettings, settings_of
from graphshard.ir import copy_of
from graphshard.offline.capture import Captured, Place, capture
from graphshard.offline.concrete import concrete
from graphshard.offline.world import Fake, Shapes, built, faked, pretended, shapes
from graphshard.pipeline import Order
from graphshard.plan import GroupInfo, Plan
from graphshard.pricing import Freedom
from graphshard.recompute import Unit

Sizes = tuple[tuple[str, int], ...]
Build = Callable[[Sizes], tuple[nn.Module, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Point:
    """What to plan for. sizes: of the inputs, by the names that the building function knows."""

    world_size: int
    ranks_per_node: int
    machine: Machine
    freedom: Freedom
    sizes: Sizes = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """plan: None if nothing fits the point's budget; `infeasible` then says why."""

    point: Point
    plan: Plan | None
    infeasible: InfeasibleBudget | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was captured, and how long that took; passes: partition and verified passes."""

    num_nodes: int
    num_groups: int
    num_params: int
    captures: int
    capture_s: float
    passes_s: float


@dataclass(slots=True)
class Study:
    """A model under study. Each capture, partition and world is made once.

    say: is told what is being done, for people who wait.
    """

    name: str
    build: Build
    points: tuple[Point, ...]
    say: Callable[[str], None] = lambda text: None
    _captures: dict[Sizes, Captured] = field(default_factory=dict)
    _symbolic: Captured | None = None
    _parts: dict[tuple[int, tuple[Unit, ...]], Parts] = field(default_factory=dict)
    _shapes: dict[Sizes, Shapes] = field(default_factory=dict)
    _worlds: dict[tuple[int, int], _World] = field(default_factory=dict)
    _placed: dict[tuple[Sizes, tuple[Unit, ...]], Parts] = field(default_factory=dict)
    _capture_s: float = 0.0
    _passes_s: float = 0.0

    def answers(self) -> Iterator[Answer]:
        """One answer per point, in their order.

        Raises OfflineError or CaptureError where the model cannot be built or captured.
        """
        self._prepare()
        for point in self.points:
            world = self._worlds[point.world_size, point.ranks_per_node]
            order = Order(world.settings, point.machine, point.freedom)

            def again(chosen: tuple[Unit, ...], point: Point = point) -> Parts:
                return self._in_world(point, chosen)

            try:
                proposal = decide(self._in_world(point), order, again)
            except InfeasibleBudget as error:
                yield Answer(point, None, error)
            else:
                yield Answer(point, replace(proposal.plan, name=self.name))

    @property
    def facts(self) -> Facts:
        """Of the first capture; times are sums over all of them."""
        first = self._symbolic or next(iter(self._captures.values()))
        infos = first.draft.program.groups
        return Facts(
            num_nodes=first.num_nodes,
            num_groups=len(infos),
            num_params=sum(p.numel for g in infos for p in g.params),
            captures=len(self._captures) or 1,
            capture_s=self._capture_s,
            passes_s=self._passes_s,
        )

    # -- worlds and captures -------------------------------------------------------------------

    def _prepare(self) -> None:
        """Capture what has to be captured, and look at the groups of every world."""
        every = list(dict.fromkeys(point.sizes for point in self.points))
        sizes = max(every)  # a size of 1 would be taken for a constant
        for index, count in enumerate(dict.fromkeys(p.world_size for p in self.points)):
            with pretended(count):
                self.say(f"building {self.name} on {count:,} ranks")
                began = perf_counter()
                fake = faked(partial(self.build, sizes))
                if index == 0:
                    self._capture_all(every, sizes, fake)
                    self._capture_s += perf_counter() - began
                for point in self.points:
                    if point.world_size == count:
                        key = count, point.ranks_per_node
                        self._worlds[key] = _world(fake, self._names, point.ranks_per_node)

    def _capture_all(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> None:
        self._shapes[sizes] = shapes(fake.inputs)
        for own in every:
            if own not in self._shapes:
                self._shapes[own] = shapes(built(partial(self.build, own))[1])
        places = _varying(list(self._shapes.values()))
        self.say(f"capturing {self.name}")
        captured = capture(fake, self.name, places)
        if all(place in captured.symbols for place in places):
            self._symbolic = captured
            return
        self._captures[sizes] = captured
        for own in every:
            if own not in self._captures:
                self.say(f"capturing {self.name} for {_sizes_text(own)}")
                self._captures[own] = capture(faked(partial(self.build, own)), self.name)

    @property
    def _names(self) -> list[str]:
        captured = self._symbolic or next(iter(self._captures.values()))
        return [info.fqn for info in captured.draft.program.groups]

    # -- parts -----------------------------------------------------------------------------

    def _in_world(self, point: Point, chosen: tuple[Unit, ...] = ()) -> Parts:
        """The partition for a point: with its sizes, and the groups of its world."""
        key = point.sizes, chosen
        if key not in self._placed:
            parts = self._cut(point.sizes, chosen)
            values = self._values(point.sizes)
            self._placed[key] = replace(parts, placed=concrete(parts.placed, values))
        parts = self._placed[key]
        world = self._worlds[point.world_size, point.ranks_per_node]
        return replace(parts, placed=parts.placed.with_groups(world.infos))

    def _cut(self, sizes: Sizes, chosen: tuple[Unit, ...]) -> Parts:
        captured = self._symbolic or self._captures[sizes]
        key = id(captured), chosen
        if key not in self._parts:
            began = perf_counter()
            joint = captured.draft.program.joint
            assert joint is not None
            self._parts[key] = parts_of(captured.draft, copy_of(joint), chosen)
            self._passes_s += perf_counter() - began
        return self._parts[key]

    def _values(self, sizes: Sizes) -> dict[str, int]:
        """Name of each symbol of the capture -> its number at these sizes."""
        if self._symbolic is None:
            return {}
        own = self._shapes[sizes]
        return {name: own[place.leaf][place.dim] for place, name in self._symbolic.symbols.items()}


@dataclass(frozen=True, slots=True)
class _World:
    """The groups of a program as they are sharded over one world."""

    infos: tuple[GroupInfo, ...]
    settings: tuple[GroupSettings, ...]


def _world(fake: Fake, names: Sequence[str], ranks_per_node: int) -> _World:
    """Raises OfflineError (GS804) if the model has other groups than the captured one."""
    groups: dict[str, FsdpGroup] = {
        name_of(group): group for state in fake.states for group in fsdp_groups(state)
    }
    missing = [name for name in names if name not in groups]
    if missing:
        raise OfflineError("GS804", f"{missing[0]} is no group on every number of ranks")
    own = [groups[name] for name in names]
    infos = tuple(describe(place, group) for place, group in enumerate(own))
    return _World(infos, settings_of(own, ranks_per_node))


def _varying(every: Sequence[Shapes]) -> tuple[Place, ...]:
    """Dimensions of input tensors that differ. Raises OfflineError (GS805) for other ranks."""
    kinds = {tuple(map(len, own)) for own in every}
    if len(kinds) > 1:
        raise OfflineError("GS805", "the inputs have other numbers of dimensions at other sizes")
    return tuple(
        Place(leaf, dim)
        for leaf, column in enumerate(zip(*every, strict=True))
        for dim, found in enumerate(zip(*column, strict=True))
        if len(set(found)) > 1
    )


def _sizes_text(sizes: Sizes) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in sizes) or "its inputs"
