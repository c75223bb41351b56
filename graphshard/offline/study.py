"""Plans of one model on several worlds, machines, budgets and input sizes, from few captures.

In: a function that builds the sharded model and its inputs, and the points to plan for. Out: one
answer per point. Input sizes that differ between the points are captured as symbols; a model that
insists on numbers is captured once for each of its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from graphshard.capture.interpreter import no_collections
from graphshard.compiler.decide import (
    Decided,
    better_of,
    decide,
    decided,
    decided_cut,
    explained,
    pose,
)
from graphshard.compiler.partition import (
    Cut,
    JointGraph,
    Partition,
    parts_of,
    released,
    repeating,
)
from graphshard.compiler.planning import PlanningInputs, Posed, best_plans, problem_of
from graphshard.cost.stragglers import with_stragglers
from graphshard.errors import CaptureError, InfeasibleBudget
from graphshard.fsdp2.describe import describe
from graphshard.graph.program import copy_of
from graphshard.offline.capture import Captured, capture
from graphshard.offline.chain import is_chain
from graphshard.offline.clock import Clock
from graphshard.offline.concrete import concrete
from graphshard.offline.point import Answer, Point
from graphshard.offline.recut import ShortModels, recut
from graphshard.offline.repeats import CAPTURED, Repeat, repeats_in, shorten, shortened
from graphshard.offline.target import Sizes
from graphshard.offline.unroll import owners_of, unrolled
from graphshard.offline.world import (
    Fake,
    InputDim,
    Made,
    Shapes,
    World,
    built,
    called_with,
    faked,
    groups_of,
    pretended,
    shapes,
    varying,
    world_of,
)
from graphshard.planner.problem import Problem
from graphshard.pricing.op_costs import GraphCosts, graph_costs
from graphshard.pricing.recompute import NO_UNITS, ChosenUnits
from graphshard.schedule.plan import Plan, Recomputed
from graphshard.view.offline import Effort

Build = Callable[[Sizes], Made]


# sizes, machine, recompute, fused, in parts, freed: what the costs of a graph hang on.
_CostsKey: TypeAlias = tuple[Sizes, str, bool, bool, bool, bool]
# What is computed again besides or offloaded, fused, freed.
_CutKey: TypeAlias = tuple[ChosenUnits, bool, bool]


class _NotCounted(Exception):
    """The whole graph cannot be had from a few of its blocks."""


@dataclass(slots=True)
class Study:
    """A model under study. Each capture, partition and world is made once.

    Where blocks are alike, a few of them are captured and the rest is counted (see `repeats`,
    `unroll` and `recut`); `whole` captures all of them. What it saves and costs to compute some
    activations again is only estimated in a sweep (`PlanningPolicy.near`). freed: only with the
    user's checkpoints replaced (True), or as they are; None: what is better, if a point's policy
    may choose. baseline: what FSDP2 would run, for the first. say: is told what is being done, for
    people who wait.
    """

    name: str
    build: Build
    points: tuple[Point, ...]
    say: Callable[[str], None] = lambda text: None
    whole: bool = False
    freed: bool | None = None
    baseline: Problem | None = None
    _repeats: list[Repeat] = field(default_factory=list)
    _captures: dict[Sizes | None, Captured] = field(default_factory=dict)
    _shapes: dict[Sizes, Shapes] = field(default_factory=dict)
    _arguments: dict[Sizes, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    _free: dict[int, JointGraph | None] = field(default_factory=dict)
    _parts: dict[tuple[Sizes, _CutKey], Partition] = field(default_factory=dict)
    _cuts: dict[tuple[int, _CutKey], Partition] = field(default_factory=dict)
    _costs: dict[_CostsKey, GraphCosts] = field(default_factory=dict)
    _short: dict[Sizes, ShortModels] = field(default_factory=dict)
    _worlds: dict[tuple[int, int], World] = field(default_factory=dict)
    _clock: Clock = field(default_factory=Clock)

    def answers(self) -> Iterator[Answer]:
        """One answer per point, in their order.

        Raises OfflineError or CaptureError where the model cannot be built or captured.
        """
        with no_collections():
            self._prepare()
        for point in self.points:
            with no_collections(), self._clock.timed("plan"):
                answer = self._answer(point)
            yield answer

    def costs(self) -> Iterator[tuple[GraphCosts, GraphCosts | None]]:
        """What the whole model costs at each point: as the user checkpoints it, and with that
        replaced, where it may be and there is something to replace. Raises as `answers`."""
        with no_collections():
            self._prepare()
        for point in self.points:
            found = [
                self._costs.get(self._key(point, freed=freed))
                or self._captured_costs(point, freed=freed)
                for freed in ((False, True) if self._may_free(point) else (False,))
            ]
            yield found[0], found[1] if found[1:] else None

    @property
    def effort(self) -> Effort:
        """So far. Counts are of the first capture; times are sums over all of them."""
        infos = next(iter(self._worlds.values())).infos
        return Effort(
            num_nodes=next(iter(self._captures.values())).num_nodes,
            num_groups=len(infos),
            num_repeated=sum(repeat.count - CAPTURED for repeat in self._repeats),
            num_params=sum(p.numel for g in infos for p in g.params),
            capture_s=self._clock.seconds["capture"],
            passes_s=self._clock.seconds["passes"],
            plan_s=self._clock.seconds["plan"],
        )

    def posed(self, point: Point) -> Posed:
        """What one of the points poses as the user's checkpoints have it, once it was answered."""
        planning = self._planning(point)
        if self._repeats:
            return self._posed_short(point, planning)
        return pose(self._cut_for(point), planning)

    def _planning(self, point: Point) -> PlanningInputs:
        world = self._worlds[point.world_size, point.ranks_per_node]
        settings = tuple(replace(s, exact_sums=not point.fused) for s in world.settings)
        return PlanningInputs(settings, point.machine, point.policy, point.fused)

    def _answer(self, point: Point) -> Answer:
        planning = self._planning(point)
        planned = self._planned_short if self._repeats else self._planned_whole
        try:
            plan = with_stragglers(planned(point, planning), point.machine, point.world_size)
        except InfeasibleBudget as error:
            return Answer(point, None, error)
        return Answer(point, replace(plan, name=self.name))

    def _planned_whole(self, point: Point, planning: PlanningInputs) -> Plan:
        if self.freed is not None:
            cut = self._cut_for(point, freed=self.freed)
            return decided_cut(cut, pose(cut, planning, self.baseline), planning).plan
        free = self._cut_for(point, freed=True) if self._may_free(point) else None
        return decide(self._cut_for(point), free, planning).plan

    def _planned_short(self, point: Point, planning: PlanningInputs) -> Plan:
        """From the costs of the whole model, which were counted."""
        own = self._posed_short(point, planning)
        as_it_is = partial(self._decided_short, own, point, planning)
        if not self._may_free(point):
            return as_it_is().plan
        free = self._posed_short(point, planning, own.problem)
        return better_of(as_it_is, partial(self._decided_short, free, point, planning)).plan

    def _posed_short(
        self, point: Point, planning: PlanningInputs, baseline: Problem | None = None
    ) -> Posed:
        infos = self._worlds[point.world_size, point.ranks_per_node].infos
        costs = replace(self._costs[self._key(point, freed=baseline is not None)], groups=infos)
        # Of a few captured blocks it is not known how many checkpoints all have.
        return Posed(costs, problem_of(costs, planning), baseline=baseline)

    def _decided_short(self, posed: Posed, point: Point, planning: PlanningInputs) -> Decided[None]:
        if point.policy.near:
            plan, _ = best_plans(posed, planning)
            return Decided(None, posed.problem, explained(plan, posed, planning))

        def again(chosen: Recomputed) -> tuple[None, GraphCosts]:
            self.say("capturing a few blocks of each kind, since some activations are not saved")
            short, infos = self._short_of(point.sizes), posed.costs.groups
            with self._clock.timed("capture"):
                costs = recut(short, self._repeats, infos, planning, chosen)
            if costs is None or [g.fqn for g in costs.groups] != [g.fqn for g in infos]:
                raise _NotCounted
            return None, replace(costs, groups=infos)

        try:
            return decided(None, again, posed, planning)
        except _NotCounted:
            return self._decided_whole(posed, point)

    def _decided_whole(self, posed: Posed, point: Point) -> Decided[None]:
        self.say("capturing the whole model, since some activations are not saved")
        freed, baseline = posed.replaced, posed.baseline
        study = Study(
            self.name, self.build, (point,), self.say, whole=True, freed=freed, baseline=baseline
        )
        return Decided(None, posed.problem, next(study.answers()).fitting())

    # -- captures and worlds -------------------------------------------------------------------

    def _prepare(self) -> None:
        """Capture what has to be captured, and look at the groups of every world."""
        every = list(dict.fromkeys(point.sizes for point in self.points))
        sizes = max(every)  # a size of 1 would be taken for a constant
        names: list[str] = []
        for count in dict.fromkeys(point.world_size for point in self.points):
            with pretended(count):
                self.say(f"building {self.name} on {count:,} ranks")
                fake = faked(partial(self.build, sizes))
                if not names:
                    names = self._capture_all(every, sizes, fake)
                for point in self.points:
                    if point.world_size == count:
                        key = count, point.ranks_per_node
                        self._worlds[key] = world_of(fake, names, point.ranks_per_node)

    def _capture_all(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> list[str]:
        """The names of the groups, in the order of their numbers."""
        with self._clock.timed("capture"):
            for own in every:
                made = fake if own == sizes else built(partial(self.build, own))
                self._shapes[own] = shapes(made)
                self._arguments[own] = made.args, made.kwargs
            self._repeats = [] if self.whole else repeats_in(fake.model)
            if self._repeats:
                self.say(f"capturing {CAPTURED} blocks of each list of alike blocks")
                if names := self._captured_short(every, sizes, fake):
                    return names
                self._repeats, fake = [], faked(partial(self.build, sizes))
            self.say("capturing the whole model")
            self._capture(every, sizes, fake)
        return [info.fqn for info in next(iter(self._captures.values())).joint_graph.program.groups]

    def _captured_short(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> list[str]:
        """Empty if the short model cannot be captured, or its blocks do not repeat exactly."""
        infos = [describe(0, group) for group in groups_of(fake)]
        try:
            with shortened(fake.model, self._repeats):
                self._capture(every, sizes, fake)
        except CaptureError as error:
            self.say(f"a model with fewer blocks cannot be captured: {error}")
            return []
        asked = [(point, False) for point in self.points]
        asked += [(point, True) for point in self.points if self._may_free(point)]
        for key, (point, freed) in {self._key(p, freed=f): (p, f) for p, f in asked}.items():
            costs: GraphCosts | None = None
            if self._are_chains(point, freed=freed):
                costs = self._captured_costs(point, freed=freed)
            for repeat in self._repeats:
                costs = costs and unrolled(costs, repeat, infos)
            # A group that is used behind the captured blocks alone would be forgotten.
            if costs is None or len(costs.groups) < len(infos):
                self.say("its blocks do not repeat exactly")
                for known in (self._captures, self._free, self._cuts, self._parts, self._costs):
                    known.clear()
                return []
            self._costs[key] = costs
        return [info.fqn for info in next(iter(self._costs.values())).groups]

    def _are_chains(self, point: Point, *, freed: bool) -> bool:
        placed = self._cut(point.sizes, (NO_UNITS, point.fused, freed)).placed
        return all(
            is_chain(placed, owners_of(placed.groups, repeat), repeat.captured)
            for repeat in self._repeats
        )

    def _fake(self, sizes: Sizes) -> Fake:
        """A fresh model, with as many blocks as are captured."""
        fake = faked(partial(self.build, sizes))
        for repeat in self._repeats:
            shorten(fake.model, repeat)
        return fake

    def _capture(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> None:
        """Once with symbols for what varies, or once for each of the sizes."""
        places = varying(list(self._shapes.values()))
        if not places:
            self._captures[None] = self._captured(fake)
            return
        # Not the largest: a buffer that is used whole would make its length a constant.
        smaller = min(every, key=lambda own: (1 in dict(own).values(), own))
        call = called_with(fake, *self._arguments[smaller])
        try:
            captured = self._captured(call, places)
        except CaptureError:
            captured = None
        if captured is not None and all(place in captured.symbols for place in places):
            self._captures[None] = captured
            return
        for own in every:
            self.say(f"capturing for {', '.join(f'{k} {v:,}' for k, v in own)}")
            self._captures[own] = self._captured(self._fake(own))

    def _captured(self, fake: Fake, varying: Sequence[InputDim] = ()) -> Captured:
        # Of a few blocks the middle ones are compared op by op: all are traced in the same way.
        return capture(fake, self.name, varying, by_blocks=not self._repeats)

    # -- parts and costs -----------------------------------------------------------------------

    def _may_free(self, point: Point) -> bool:
        """The user's checkpoints may be replaced, and there are some."""
        if not point.policy.replaces_checkpoints:
            return False
        return self._joint_graph(self._capture_of(point.sizes), freed=True) is not None

    def _joint_graph(self, captured: Captured, *, freed: bool) -> JointGraph | None:
        if not freed:
            return captured.joint_graph
        if id(captured) not in self._free:
            self._free[id(captured)] = released(captured.joint_graph)
        return self._free[id(captured)]

    def _cut_for(self, point: Point, *, freed: bool = False) -> Cut:
        """The partition for a point, with its sizes and the groups of its world."""
        infos = self._worlds[point.world_size, point.ranks_per_node].infos

        def again(chosen: ChosenUnits = NO_UNITS) -> Partition:
            parts = self._cut(point.sizes, (chosen, point.fused, freed))
            return replace(parts, placed=parts.placed.with_groups(infos))

        return Cut(again(), again, self._capture_of(point.sizes).joint_graph.checkpoints)

    def _short_of(self, sizes: Sizes) -> ShortModels:
        return self._short.setdefault(sizes, ShortModels(partial(self.build, sizes), self.name))

    def _capture_of(self, sizes: Sizes) -> Captured:
        return self._captures[None if None in self._captures else sizes]

    def _cut(self, sizes: Sizes, key: _CutKey) -> Partition:
        if (sizes, key) not in self._parts:
            captured = self._capture_of(sizes)
            own = self._shapes[sizes]
            numbers = {name: own[at.leaf][at.dim] for at, name in captured.symbols.items()}
            with self._clock.timed("passes"):
                parts = self._partition(captured, key)
                placed = concrete(parts.placed, numbers)
            self._parts[sizes, key] = replace(parts, placed=placed)
        return self._parts[sizes, key]

    def _partition(self, captured: Captured, key: _CutKey) -> Partition:
        if (id(captured), key) not in self._cuts:
            chosen, fused, freed = key
            joint_graph = self._joint_graph(captured, freed=freed)
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

    def _key(self, point: Point, *, freed: bool) -> _CostsKey:
        policy, name = point.policy, point.machine.name
        return point.sizes, name, policy.recompute, point.fused, point.in_parts, freed

    def _captured_costs(self, point: Point, *, freed: bool) -> GraphCosts:
        return graph_costs(
            self._cut(point.sizes, (NO_UNITS, point.fused, freed)).placed,
            point.machine,
            recompute=point.policy.recompute,
            fused=point.fused,
            parts=point.in_parts,
        )
