"""A user's model under tuning: what it is, what its steps cost, and its groups on each world.

One capture serves all groupings and meshes: it is made with the finest groups, of which all others
are unions (`graphshard.tune.merge`). A model whose `fully_shard` calls cannot be taken back keeps
them, with its meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist
from torch import nn

from graphshard.cost.machine import Machine
from graphshard.cost.optimizer import DEFAULT, Optimizer
from graphshard.errors import CaptureError, OfflineError
from graphshard.fsdp2 import states_under
from graphshard.fsdp2.describe import name_of
from graphshard.fsdp2.undo import Sharding, obstacle, sharding_of, undo
from graphshard.offline.point import Point
from graphshard.offline.repeats import Repeat, repeats_in
from graphshard.offline.repeats import is_inside as is_group_of
from graphshard.offline.study import Study
from graphshard.offline.target import Sizes
from graphshard.offline.world import Fake, Made, built, faked, groups_of, pretended, world_of
from graphshard.offline.world import World as Groups
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.setting import (
    Checkpointing,
    Grouping,
    MeshShape,
    Obstacle,
    Scheduling,
    Setting,
)
from graphshard.tune.degrees import Degrees
from graphshard.tune.layout import (
    checkpointed,
    dims_of,
    group_name,
    meshes_of,
    shape_of,
    shard,
    shards_alike,
    unwrapped,
)
from graphshard.tune.merge import Described, Union, renamed
from graphshard.tune.modules import (
    Groupings,
    Modules,
    groupings_of,
    owner_of,
    root_of,
)
from graphshard.tune.short_study import ShortStudy
from graphshard.tune.undone import Undone, with_blocks

Build = Callable[[Sizes], Made]
World = Mapping[str, Described]


@dataclass(frozen=True, slots=True)
class Machines:
    """What is tuned for."""

    machine: Machine
    ranks_per_node: int
    fused: bool


@dataclass(slots=True)
class Subject:
    """See above. sizes: of all batches to be tried. groupings: None for a model that keeps its
    calls (`kept` says why). is_sharded: FUNCTION had sharded it. moves: onto other meshes (not
    beside tensor parallel of its own, say). optimizer: what steps the parameters. tensor: parallel,
    as the model has a plan for it. repeats: lists of alike blocks, once these are known."""

    name: str
    build: Build
    machines: Machines
    worlds: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    say: Callable[[str], None] = lambda text: None
    optimizer: Optimizer = DEFAULT
    tensor: Degrees = field(default_factory=Degrees)
    regroups: bool = True
    is_sharded: bool = True
    moves: bool = True
    kept: Obstacle | None = None
    groupings: Groupings | None = None
    sharding: Sharding = field(default_factory=Sharding)
    _studies: dict[Checkpointing, Study | None] = field(default_factory=dict)
    _finest: dict[tuple[int, MeshShape | None], World] = field(default_factory=dict)
    _undone_in: dict[int, Undone] = field(default_factory=dict)
    _whole: tuple[str, ...] | None = None
    repeats: tuple[Repeat, ...] = ()
    _own: dict[int, World] = field(default_factory=dict)
    _shapes: dict[int, MeshShape | None] = field(default_factory=dict)

    def prepare(self, *, regroups: bool = True) -> None:
        """Look at the model, and capture its step. Raises OfflineError, CaptureError.

        regroups: else only what the model does by itself is priced (`Scheduling.FSDP2`).
        """
        self.regroups = regroups
        if not regroups:
            self._capture()
            return
        self._look_at_model()
        try:
            self._capture()
            return
        except CaptureError as error:
            if self.groupings is None or not (self.is_sharded or self._is_apart):
                raise
            self.say(f"it is no graph in these groups: {error}")
        if self._is_apart:  # a parameter may be read where its module is not
            self._look_at_model(may_be_apart=False)
            try:
                self._capture()
                return
            except CaptureError:
                if not self.is_sharded:
                    raise
        self.groupings, self.kept = None, Obstacle.CAPTURE
        self._capture()

    @property
    def _is_apart(self) -> bool:
        return self.groupings is not None and Grouping.APART in self.groupings.calls

    def _look_at_model(self, *, may_be_apart: bool = True) -> None:
        first = self.worlds[0]
        with pretended(first):
            made = built(partial(self.build, self.sizes[0]))
            self._look(made.model, may_be_apart=may_be_apart)
        if self.groupings is not None:
            self._undone_in = {first: Undone(made, self.sharding, self.groupings.finest)}

    def _look(self, model: nn.Module, *, may_be_apart: bool) -> None:
        self.is_sharded = bool(states_under(model))
        self.kept = obstacle(model)
        if self.kept is not None:
            self.sharding = sharding_of(model)
            return
        self.sharding = undo(model)
        meshes = [call.mesh for call in self.sharding.calls if call.mesh is not None]
        if self.is_sharded:
            own = shape_of(meshes, dist.get_world_size())
            self.moves = own is not None and not self.sharding.has_dtensors
        root = root_of(self.sharding)
        if root is None:
            self.kept = Obstacle.ROOTS
            return
        groupings = groupings_of(model, self.sharding, root, may_be_apart=may_be_apart)
        fitting = {
            kind: calls
            for kind, calls in groupings.calls.items()
            if shards_alike(model, self.sharding, calls)
        }
        self.groupings = Groupings(
            fitting, groupings.finest, groupings.blocks, groupings.params, root
        )
        if self.moves:
            self.tensor.look_at(model)

    # -- captures ------------------------------------------------------------------------------

    def on(self, machine: Machine) -> Subject:
        """The same model, which was prepared, on other machines, from the same captures."""
        return replace(self, machines=replace(self.machines, machine=machine))

    def costs(self, setting: Setting) -> GraphCosts:
        """What the step costs with what the setting checkpoints. Raises CaptureError."""
        kind = setting.checkpointing
        is_full = kind is Checkpointing.FULL
        as_captured = Checkpointing.FULL if is_full else Checkpointing.AS_IS
        study: Study | ShortStudy | None = self._study_of(as_captured)
        if setting.tensor > 1:
            study = self.tensor.study(as_captured, setting.tensor)
        assert study is not None
        point = self.point(setting.sizes)
        if setting.scheduling is Scheduling.FSDP2:  # which knows no parts of groups
            point = replace(point, policy=replace(point.policy, regroup=False))
        found = study.costs(point, freed=kind is Checkpointing.AUTO and self.checkpoints)
        return unwrapped(found) if is_full else found

    @property
    def checkpoints(self) -> bool:
        """The model checkpoints something that the planner may decide in its place."""
        study = self._study_of(Checkpointing.AS_IS)
        return study is not None and study.may_free(self.point(self.sizes[0]))

    @property
    def counts_blocks(self) -> bool:
        """A few captured blocks stand for all of `repeats`."""
        study = self._study_of(Checkpointing.AS_IS)
        return study is not None and study.effort.num_repeated > 0

    @property
    def may_checkpoint(self) -> bool:
        """The model checkpoints nothing, and each of its blocks could be."""
        if self.checkpoints or self.groupings is None or not self.groupings.blocks:
            return False
        return self._study_of(Checkpointing.FULL) is not None

    def _capture(self) -> None:
        study = self._studied(self._captured)
        self._studies = {Checkpointing.AS_IS: study}
        if self.groupings is not None and study.repeats:
            self._found(study.present, study.repeats)

    def _study_of(self, kind: Checkpointing) -> Study | None:
        """kind: AS_IS, or FULL, which is captured when it is asked for; None where it cannot be."""
        if kind not in self._studies:
            self.say("capturing it with each block checkpointed")
            try:
                self._studies[kind] = self._studied(partial(self._captured, full=True))
            except (CaptureError, OfflineError, ValueError) as error:
                self.say(f"with each block checkpointed it cannot be captured: {error}")
                self._studies[kind] = None
        return self._studies[kind]

    def degrees(self, world_size: int) -> tuple[int, ...]:
        """Of tensor parallel, 1 included."""
        may_have = self.groupings is not None and self.moves
        return self.tensor.possible(self, world_size) if may_have else (1,)

    def _studied(self, build: Build) -> Study:
        worlds = self.worlds if self.groupings is None else self.worlds[:1]
        points = tuple(self.point(own, world) for world in worlds for own in self.sizes)
        study = Study(self.name, build, points, say=self.say)
        study.prepare()
        return study

    def point(self, sizes: Sizes, world_size: int = 0) -> Point:
        """world_size: 0 for the one that is captured."""
        policy = PlanningPolicy()
        if self.regroups:
            policy = PlanningPolicy(recompute=True, replaces_checkpoints=True, regroup=True)
        own = self.machines
        ranks = world_size or self.worlds[0]
        return Point(ranks, own.ranks_per_node, own.machine, policy, sizes, own.fused)

    def _captured(self, sizes: Sizes, *, full: bool = False) -> Made:
        shape = None if self.is_sharded else MeshShape(1, dist.get_world_size())
        return self.sharded(sizes, shape, full=full)

    def bare(self) -> nn.Module:
        """The model without shards."""
        with pretended(self.worlds[0]):
            model = built(partial(self.build, self.sizes[0])).model
            if self.groupings is not None:
                undo(model)
        return model

    def sharded(
        self, sizes: Sizes, shape: MeshShape | None, *, full: bool = False, count: int | None = None
    ) -> Made:
        """With the finest groups. shape: None for the meshes of the model's own calls. count: of
        blocks that are alike, once it is known which are; 0: as many as are captured; None: all."""
        if self.groupings is None:
            return self.build(sizes)
        undone = self._undone(sizes)
        if count is not None:
            undone = with_blocks(undone, self.repeats, count)
        return self._resharded(undone, shape, full=full)

    def _undone(self, sizes: Sizes) -> Undone:
        assert self.groupings is not None
        made = self.build(sizes)
        return Undone(made, undo(made.model), self.groupings.finest)

    def _resharded(self, undone: Undone, shape: MeshShape | None, *, full: bool = False) -> Made:
        model, meshes = undone.made.model, None if shape is None else meshes_of(shape)
        if meshes is not None and meshes.tensor is not None:
            self.tensor.parallelize(model, meshes.tensor)
        if full:
            assert self.groupings is not None
            there = {name for name, _ in model.named_modules()}
            for name in (name for blocks in self.groupings.blocks for name in blocks):
                if name in there:
                    checkpointed(model, name)
        shard(model, undone.sharding, undone.calls, None if meshes is None else meshes.data)
        return undone.made

    # -- worlds --------------------------------------------------------------------------------

    def finest(self, world_size: int, shape: MeshShape | None) -> World:
        """The finest groups on a mesh; None: of the model's own calls."""
        key = world_size, shape
        if key not in self._finest:
            with pretended(world_size):
                fake = faked(partial(self._short_on, world_size, shape))
                world = self._world(fake)
                if self._whole is None:
                    self._found(tuple(world), tuple(repeats_in(fake.model)))
                else:
                    world = {name: self._of_alike(world, name) for name in self._whole}
            self._finest[key] = world
        return self._finest[key]

    def _found(self, whole: tuple[str, ...], repeats: tuple[Repeat, ...]) -> None:
        """The names of all groups, and what repeats."""
        self._whole, self.repeats = whole, repeats
        found = self._undone_in.items()
        self._undone_in = {world: with_blocks(undone, repeats, 1) for world, undone in found}

    def _short_on(self, world_size: int, shape: MeshShape | None) -> Made:
        """With one of each list of alike blocks, once these are known.

        A model is built once for a world, and copied for each mesh, of which it is assumed to know
        nothing. A function that parallelizes it knows the one that was built, and no copy.
        """
        knows_model = self.tensor.plan is not None and self.tensor.plan.styles is None
        if self.groupings is None or shape is None or not self.repeats or knows_model:
            return self.sharded(self.sizes[0], shape, count=1)
        if world_size not in self._undone_in:
            found = self._undone(self.sizes[0])
            self._undone_in[world_size] = with_blocks(found, self.repeats, 1)
        undone = self._undone_in[world_size]
        return self._resharded(replace(undone, made=deepcopy(undone.made)), shape)

    def may_be_on(self, world_size: int, shape: MeshShape) -> bool:
        """FSDP2 takes the model on this mesh; it cuts dims other than the first evenly only."""
        try:
            self.finest(world_size, shape)
        except (NotImplementedError, ValueError, AssertionError) as error:
            self.say(f"not over {' x '.join(map(str, dims_of(shape).values()))} ranks: {error}")
            return False
        return True

    def _of_alike(self, world: World, name: str) -> Described:
        """The group, where of alike blocks only the first was sharded."""
        for repeat in self.repeats:
            block = next((block for block in repeat.names if is_group_of(name, block)), None)
            if block is not None:
                first = repeat.names[0]
                return renamed(world[name.replace(block, first, 1)], first, block)
        return world[name]

    def own(self, world_size: int) -> World:
        """The groups that the model's own calls make."""
        if world_size not in self._own:
            study = self._studies.get(Checkpointing.AS_IS) if self.groupings is None else None
            known = study and study.world(world_size, self.machines.ranks_per_node)
            self._own[world_size] = _described(known) if known else self._own_built(world_size)
        return self._own[world_size]

    def _own_built(self, world_size: int) -> World:
        with pretended(world_size):
            made = built(partial(self.build, self.sizes[0]))
            meshes = [c.mesh for c in sharding_of(made.model).calls if c.mesh is not None]
            self._shapes[world_size] = shape_of(meshes, world_size)
            return self._world(faked(lambda: made))

    def own_shape(self, world_size: int) -> MeshShape | None:
        """The mesh of the model's own calls, if it is one of all ranks."""
        self.own(world_size)
        return self._shapes[world_size]

    def data_ranks(self, world_size: int, shape: MeshShape | None = None) -> int:
        """Ranks, or groups of tensor parallel, that have batches of their own. shape: None for the
        meshes of the model's own calls."""
        if shape is not None:
            return shape.data_ranks
        if not self.is_sharded:
            return world_size
        every = (one.settings for one in self.own(world_size).values())
        return max(own.ranks * own.replicas for own in every)

    def _world(self, fake: Fake) -> World:
        names = [name_of(group) for group in groups_of(fake)]
        return _described(world_of(fake, names, self.machines.ranks_per_node))

    def unions(self, grouping: Grouping) -> list[Union]:
        """Of the finest groups. The model's groupings must be known."""
        assert self.groupings is not None
        calls = self.groupings.calls[grouping]
        members: dict[Modules, list[str]] = {modules: [] for modules in calls}
        for modules in self.groupings.finest:
            own = owner_of(modules[0], calls)
            assert own is not None
            members[own].append(group_name(modules))
        return [
            Union(group_name(modules), tuple(names), modules == (self.groupings.root,))
            for modules, names in members.items()
        ]


def _described(world: Groups) -> World:
    both = zip(world.infos, world.settings, strict=True)
    return {info.fqn: Described(info, settings) for info, settings in both}
