"""Plans of one model on several worlds, machines, budgets and input sizes, from few captures.

In: a function that builds the sharded model and its inputs, and the points to plan for. Out: one
answer per point. Input sizes that differ between the points are captured as symbols; a model that
insists on numbers is captured once for each of its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from graphshard.compiler.partition import Cut, Partition
from graphshard.compiler.planning import PlanningInputs, Posed, best_plans, problem_of
from graphshard.cost.stragglers import with_stragglers
from graphshard.errors import CaptureError, InfeasibleBudget
from graphshard.fsdp2.describe import describe
from graphshard.offline.capture import capture
from graphshard.offline.clock import Clock
from graphshard.offline.counted import CostsKey, costs_key, counted_costs
from graphshard.offline.cuts import Cuts
from graphshard.offline.point import Answer, Point
from graphshard.offline.recut import ShortModels, recut
from graphshard.offline.repeats import Repeat, repeats_in, shorten, shortened
from graphshard.offline.same_model import SameModel
from graphshard.offline.target import Sizes
from graphshard.offline.world import (
    Fake,
    Made,
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
from graphshard.planner.room import with_room
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.recompute import NO_UNITS, ChosenUnits
from graphshard.schedule.plan import GroupInfo, LeftOut, Plan, Recomputed
from graphshard.view.offline import Effort

Build = Callable[[Sizes], Made]


class _NotCounted(Exception):
    """The whole graph cannot be had from a few of its blocks."""


@dataclass(slots=True)
class Study:
    """A model under study. Each capture, partition and world is made once.

    Where blocks are alike, a few of them are captured and the rest is counted (see `repeats`,
    `chain`, `unroll` and `recut`); `whole` captures all of them. What it saves and costs to compute
    some activations again is only estimated in a sweep (`PlanningPolicy.near`). room: each plan is
    told with what more memory would buy. freed: only with the user's checkpoints replaced (True),
    or as they are; None: what is better, if a point's policy may choose. baseline: what FSDP2 would
    run, for the first. say: is told what is being done, for people who wait.
    """

    name: str
    build: Build
    points: tuple[Point, ...]
    say: Callable[[str], None] = lambda text: None
    whole: bool = False
    room: bool = False
    freed: bool | None = None
    baseline: Problem | None = None
    _repeats: list[Repeat] = field(default_factory=list)
    _infos: list[GroupInfo] = field(default_factory=list)  # of all blocks
    _arguments: dict[Sizes, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    _costs: dict[CostsKey, GraphCosts] = field(default_factory=dict)
    _short: dict[Sizes, ShortModels] = field(default_factory=dict)
    _worlds: dict[tuple[int, int], World] = field(default_factory=dict)
    _present: list[str] = field(default_factory=list)
    _clock: Clock = field(default_factory=Clock)
    _cuts: Cuts = field(init=False)
    _model: SameModel = field(init=False)

    def __post_init__(self) -> None:
        self._cuts = Cuts(self._clock)
        self._model = SameModel(self.build)

    def answers(self) -> Iterator[Answer]:
        """One answer per point, in their order.

        Raises OfflineError or CaptureError where the model cannot be built or captured.
        """
        self.prepare()
        yield from map(self.answer, self.points)

    def answer(self, point: Point) -> Answer:
        """For one of the points, or another policy on its ranks, once it was prepared.

        Assumed of the other policy: groups travel in parts if they do for one of the points.
        """
        with no_collections(), self._clock.timed("plan"):
            answer = self._answer(point)
        # What was counted, or cut again, may have been captured of several models.
        return self._from_one_build(point) if self._model.varies and not self.whole else answer

    def _from_one_build(self, point: Point) -> Answer:
        self.say("capturing the whole model, since numbers in it are others each time")
        study = Study(self.name, self.build, (point,), self.say, whole=True, room=self.room)
        return next(study.answers())

    def costs(self, point: Point, *, freed: bool = False) -> GraphCosts:
        """What the whole model costs as the user checkpoints it, or with that replaced (see
        `may_free`), once it was prepared.

        point: of captured sizes, on any machine. Raises CaptureError (GS910) if the captured blocks
        do not stand for all there.
        """
        with no_collections():
            found = self._whole_costs(point, freed=freed)
        if found is None:
            raise CaptureError("GS910", f"its blocks do not repeat exactly on {point.machine.name}")
        return found

    @property
    def effort(self) -> Effort:
        """So far. Counts are of the first capture; times are sums over all of them."""
        infos = next(iter(self._worlds.values())).infos
        return Effort(
            num_nodes=next(iter(self._cuts.captures.values())).num_nodes,
            num_groups=len(infos),
            num_repeated=sum(repeat.count - repeat.captured for repeat in self._repeats),
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

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        """Lists of alike blocks of which a few were captured, once it was prepared."""
        return tuple(self._repeats)

    @property
    def present(self) -> tuple[str, ...]:
        """The names of all groups, in the order in which they were found."""
        return tuple(self._present)

    def world(self, world_size: int, ranks_per_node: int) -> World | None:
        """The groups on one of the points' worlds, once it was prepared."""
        return self._worlds.get((world_size, ranks_per_node))

    def _planning(self, point: Point) -> PlanningInputs:
        world = self._worlds[point.world_size, point.ranks_per_node]
        settings = tuple(replace(s, exact_sums=not point.fused) for s in world.settings)
        return PlanningInputs(settings, point.job_machine, point.policy, point.fused)

    def _answer(self, point: Point) -> Answer:
        planning = self._planning(point)
        planned = self._planned_short if self._repeats else self._planned_whole
        try:
            found = planned(point, planning)
            plan = with_stragglers(self._told(found), point.machine, point.world_size)
        except InfeasibleBudget as error:
            return Answer(point, None, error)
        inside = {info.fqn for info in plan.groups}
        left_out = tuple(LeftOut(fqn) for fqn in self._present if fqn not in inside)
        return Answer(point, replace(plan, name=self.name, left_out=left_out))

    def _told(self, found: Decided[Any]) -> Plan:
        """With what more memory would buy, if that was asked."""
        if not self.room:
            return found.plan
        return replace(found.plan, estimate=with_room(found.plan.estimate, found.problem))

    def _planned_whole(self, point: Point, planning: PlanningInputs) -> Decided[Any]:
        if self.freed is not None:
            cut = self._cut_for(point, freed=self.freed)
            return decided_cut(cut, pose(cut, planning, self.baseline), planning)
        free = self._cut_for(point, freed=True) if self.may_free(point) else None
        return decide(self._cut_for(point), free, planning)

    def _planned_short(self, point: Point, planning: PlanningInputs) -> Decided[Any]:
        """From the costs of the whole model, which were counted."""
        own = self._posed_short(point, planning)
        as_it_is = partial(self._decided_short, own, point, planning)
        if not self.may_free(point):
            return as_it_is()
        free = self._posed_short(point, planning, own.problem)
        return better_of(as_it_is, partial(self._decided_short, free, point, planning))

    def _posed_short(
        self, point: Point, planning: PlanningInputs, baseline: Problem | None = None
    ) -> Posed:
        infos = self._worlds[point.world_size, point.ranks_per_node].infos
        costs = replace(self._costs[costs_key(point, freed=baseline is not None)], groups=infos)
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
                costs = recut(short, point.world_size, self._repeats, infos, planning, chosen)
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

    def prepare(self) -> None:
        """Capture what has to be, and look at the groups of every world. Raises as `answers`."""
        with no_collections():
            self._prepare()

    def _prepare(self) -> None:
        every = list(dict.fromkeys(point.sizes for point in self.points))
        sizes = max(every)  # a size of 1 would be taken for a constant
        names: list[str] = []
        for count in dict.fromkeys(point.world_size for point in self.points):
            with pretended(count):
                self.say(f"building {self.name} on {count:,} ranks")
                fake = faked(partial(self._model, sizes))
                if not names:
                    names = self._capture_all(every, sizes, fake)
                    self._present = [describe(0, group).fqn for group in groups_of(fake)]
                for point in self.points:
                    if point.world_size == count:
                        key = count, point.ranks_per_node
                        self._worlds[key] = world_of(fake, names, point.ranks_per_node)

    def _capture_all(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> list[str]:
        """The names of the groups, in the order of their numbers."""
        with self._clock.timed("capture"):
            for own in every:
                made = fake if own == sizes else built(partial(self._model, own))
                self._cuts.shapes[own] = shapes(made)
                self._arguments[own] = made.args, made.kwargs
            inside = any(point.in_parts for point in self.points)
            self._repeats = [] if self.whole else repeats_in(fake.model, cut_inside=inside)
            if self._repeats:
                self.say("capturing a few blocks of each list of alike blocks")
                if names := self._captured_short(every, sizes, fake):
                    return names
                self._repeats, self._infos = [], []
                fake = faked(partial(self._model, sizes))
            self.say("capturing the whole model")
            self._capture(every, sizes, fake)
        return [
            info.fqn for info in next(iter(self._cuts.captures.values())).joint_graph.program.groups
        ]

    def _captured_short(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> list[str]:
        """Empty if the short model cannot be captured, or its blocks do not repeat exactly."""
        self._infos = [describe(0, group) for group in groups_of(fake)]
        try:
            with shortened(fake.model, self._repeats):
                self._capture(every, sizes, fake)
        except CaptureError as error:
            self.say(f"a model with fewer blocks cannot be captured: {error}")
            return []
        asked = [(point, False) for point in self.points]
        asked += [(point, True) for point in self.points if self.may_free(point)]
        if any(self._whole_costs(point, freed=freed) is None for point, freed in asked):
            self.say("its blocks do not repeat exactly")
            self._cuts.forget_captures()
            self._costs.clear()
            return []
        return [info.fqn for info in next(iter(self._costs.values())).groups]

    def _fake(self, sizes: Sizes) -> Fake:
        """A fresh model, with as many blocks as are captured."""
        fake = faked(partial(self._model, sizes))
        for repeat in self._repeats:
            shorten(fake.model, repeat)
        return fake

    def _capture(self, every: Sequence[Sizes], sizes: Sizes, fake: Fake) -> None:
        """As every point has compute priced."""
        for fused in dict.fromkeys(point.fused for point in self.points):
            own = self._fake(sizes) if self._cuts.captures else fake
            self._capture_as(every, own, fused=fused)

    def _capture_as(self, every: Sequence[Sizes], fake: Fake, *, fused: bool) -> None:
        """Once with symbols for what varies, or once for each of the sizes."""
        places = varying(list(self._cuts.shapes.values()))
        if not places:
            self._cuts.captures[fused, None] = capture(fake, self.name, fused=fused)
            return
        # Not the largest: a buffer that is used whole would make its length a constant.
        smaller = min(every, key=lambda own: (1 in dict(own).values(), own))
        call = called_with(fake, *self._arguments[smaller])
        try:
            captured = capture(call, self.name, places, fused=fused)
        except CaptureError:
            captured = None
        if captured is not None and all(place in captured.symbols for place in places):
            self._cuts.captures[fused, None] = captured
            return
        for own in every:
            self.say(f"capturing for {', '.join(f'{k} {v:,}' for k, v in own)}")
            self._cuts.captures[fused, own] = capture(self._fake(own), self.name, fused=fused)

    # -- parts and costs -----------------------------------------------------------------------

    def may_free(self, point: Point) -> bool:
        """The user's checkpoints may be replaced, and there are some; once it was prepared."""
        return self._cuts.may_free(point)

    def _cut_for(self, point: Point, *, freed: bool = False) -> Cut:
        """The partition for a point, with its sizes and the groups of its world."""
        infos = self._worlds[point.world_size, point.ranks_per_node].infos

        def again(chosen: ChosenUnits = NO_UNITS) -> Partition:
            parts = self._cuts.cut(point.sizes, (chosen, point.fused, freed))
            return replace(parts, placed=parts.placed.with_groups(infos))

        return Cut(
            again(),
            again,
            self._cuts.capture_of(point.sizes, fused=point.fused).joint_graph.checkpoints,
        )

    def _short_of(self, sizes: Sizes) -> ShortModels:
        return self._short.setdefault(sizes, ShortModels(partial(self._model, sizes), self.name))

    def _whole_costs(self, point: Point, *, freed: bool) -> GraphCosts | None:
        """Of all blocks; None if the captured ones do not stand for them."""
        key = costs_key(point, freed=freed)
        if key not in self._costs:
            costs = counted_costs(self._cuts, self._repeats, self._infos, point, freed=freed)
            if costs is None:
                return None
            self._costs[key] = costs
        return self._costs[key]
