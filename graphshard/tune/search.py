"""The best setting of each number of GPUs, and the front around it.

Settings are bounded first; then those that could still be the best are planned, the most promising
first, until no bound is TOLERANCE better than the best plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from time import perf_counter

from graphshard.offline.target import Sizes
from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    Resharding,
    Scheduling,
    Setting,
)
from graphshard.tune.degrees import tensor_sizes
from graphshard.tune.layout import shapes_for
from graphshard.tune.pricing import Priced, Pricer
from graphshard.tune.queue import TOLERANCE, Queue
from graphshard.tune.subject import Subject

# No reason for another setting than the simpler one before it.
TIE = 0.005
# A plan is searched well enough where it is as near to its bound.
FAR = 0.05
# So long, and for so many plans at least, the best is looked for.
PATIENCE_S, LEAST_PLANS = 20.0, 10
# Of the best plan's peak: what another point of the front is allowed.
LESS = (0.6,)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for. batches: what may be run as one micro-step. batch_tokens: of all
    ranks in one step; None: a step is one micro-step."""

    budget_bytes: int
    batches: tuple[Sizes, ...]
    batch_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Accumulated:
    """`micro_steps` of `sizes` are a step; sync_each: see `Setting`."""

    sizes: Sizes
    micro_steps: int = 1
    sync_each: bool = True


def with_batch(setting: Setting, batch: Accumulated) -> Setting:
    return replace(
        setting, sizes=batch.sizes, micro_steps=batch.micro_steps, sync_each=batch.sync_each
    )


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched for one number of GPUs. batches: by ranks of a tensor-parallel group."""

    world_size: int
    shapes: tuple[MeshShape | None, ...]
    groupings: tuple[Grouping, ...]
    reshards: tuple[Resharding, ...]
    checkpointings: tuple[Checkpointing, ...]
    batches: Mapping[int, tuple[Accumulated, ...]]
    budget_bytes: int

    def settings(self, reshards: Sequence[Resharding] | None = None) -> Iterator[Setting]:
        chosen = self.reshards if reshards is None else reshards
        for shape, grouping, reshard, kind in product(
            self.shapes, self.groupings, chosen, self.checkpointings
        ):
            if not _may_reshard(shape, reshard):
                continue
            for batch in self.batches_on(shape):
                own = Setting(self.world_size, shape, grouping, reshard, kind, batch.sizes)
                yield replace(with_batch(own, batch), budget_bytes=self.budget_bytes)

    def batches_on(self, shape: MeshShape | None) -> tuple[Accumulated, ...]:
        return self.batches[1 if shape is None else shape.tensor]

    @property
    def size(self) -> int:
        return sum(1 for _ in self.settings())


@dataclass(frozen=True, slots=True)
class Gain:
    """Without one decision, the best setting would be `without`."""

    decision: Decision
    without: Priced


@dataclass(frozen=True, slots=True)
class Found:
    """For one number of GPUs. present: what the model does by itself, None if it was not sharded.
    best: None if nothing fits, then `nearest` is the setting that needs least. front: no other is
    faster and smaller; the fastest first. num_planned: of num_settings, and for the gains. left: of
    what was not planned, how much faster than the best the most promising one can be at most."""

    world_size: int
    present: Priced | None
    best: Priced | None
    front: tuple[Priced, ...] = ()
    gains: tuple[Gain, ...] = ()
    num_settings: int = 0
    num_planned: int = 0
    left: float = 0.0
    nearest: Priced | None = None


def space_of(subject: Subject, world_size: int, asked: Asked) -> Space:
    groupings = subject.groupings
    degrees = subject.degrees(world_size)
    shapes: tuple[MeshShape | None, ...] = (None,)
    if groupings is not None and subject.moves:
        per_node = subject.machines.ranks_per_node
        every = (s for t in degrees for s in shapes_for(world_size, per_node, t))
        shapes = tuple(shape for shape in every if subject.may_be_on(world_size, shape))
    kinds = [Checkpointing.AS_IS] if subject.checkpoints else []
    kinds += [Checkpointing.AUTO]
    kinds += [Checkpointing.FULL] if subject.may_checkpoint else []
    reshards = [Resharding.OPEN]
    if groupings is not None:
        reshards += [Resharding.ALWAYS, Resharding.NEVER]
        if world_size > subject.machines.ranks_per_node:
            reshards.append(Resharding.NODE)
    return Space(
        world_size,
        shapes,
        tuple(groupings.calls) if groupings is not None else (Grouping.AS_IS,),
        tuple(reshards),
        tuple(kinds),
        {t: tuple(batches_for(subject, world_size, asked, t)) for t in degrees},
        asked.budget_bytes,
    )


def _may_reshard(shape: MeshShape | None, reshard: Resharding) -> bool:
    """Beside tensor parallel FSDP2 has no mesh of a node (an int `reshard_after_forward`)."""
    return shape is None or shape.tensor == 1 or reshard is not Resharding.NODE


def batches_for(
    subject: Subject, world_size: int, asked: Asked, tensor: int = 1
) -> Iterator[Accumulated]:
    """What a step may be made of, with so many ranks in a tensor-parallel group."""
    for sizes in asked.batches:
        if tensor > 1 and sizes not in tensor_sizes(subject.sizes):
            continue
        if asked.batch_tokens is None:
            yield Accumulated(sizes)
            continue
        own = dict(sizes)
        tokens = own["batch"] * own["seq"] * subject.data_ranks(world_size) // tensor
        if asked.batch_tokens % tokens == 0:
            micro_steps = asked.batch_tokens // tokens
            yield Accumulated(sizes, micro_steps)
            if micro_steps > 1:
                yield Accumulated(sizes, micro_steps, sync_each=False)


def found_for(subject: Subject, pricer: Pricer, space: Space, present: Setting | None) -> Found:
    """The best setting of `space`, and what is around it."""
    before = pricer.num_planned
    now = None if present is None else pricer.price(present)
    best, left = _best(pricer, space)
    if best is None:
        planned, nearest = pricer.num_planned - before, _nearest(pricer, space)
        return Found(space.world_size, now, None, (), (), space.size, planned, nearest=nearest)
    tried = [priced for priced in pricer.tried if _is_of(priced.setting, space)]
    around = list(_around(pricer, space, best))
    reverted = _reverted(pricer.subject, space, best.setting, present)
    without = [(decision, other) for decision, other in reverted if other != best.setting]
    pricer.price_all([*around, *(setting for _, setting in without)])
    others = [*tried, *map(pricer.price, around)]
    return Found(
        space.world_size,
        now,
        best,
        tuple(front_of(pricer, best, [p for p in others if p.plan is not None])),
        tuple(Gain(decision, pricer.price(setting)) for decision, setting in without),
        space.size,
        pricer.num_planned - before,
        left,
    )


def _is_of(setting: Setting, space: Space) -> bool:
    return (
        setting.world_size == space.world_size
        and setting.scheduling is Scheduling.PLANNED
        and setting.checkpointing is not Checkpointing.NONE
    )


def _best(pricer: Pricer, space: Space) -> tuple[Priced | None, float]:
    """The best, and what is left (see `Found`)."""
    first, *others = space.reshards
    queue = Queue(pricer, space.budget_bytes)
    for setting in space.settings((first,)):
        queue.add(setting)
    best, reached, before, began = None, 0.0, pricer.num_planned, perf_counter()
    while queue.next_is_bound():
        left = max(one.rate for one in queue.waiting) / reached - 1 if reached else inf
        tired = perf_counter() - began > PATIENCE_S and pricer.num_planned - before >= LEAST_PLANS
        if left <= TOLERANCE or (tired and best is not None):
            return best, max(0.0, left)
        promised = queue.pop()
        if promised.rate <= reached:
            continue
        priced, setting = pricer.price(promised.setting), promised.setting
        if priced.plan is not None and pricer.rate(priced) > reached * (1 + TIE):
            best, reached = priced, pricer.rate(priced)
        # Another rule of resharding is no better than the bound of this one, and mostly one of the
        # planner's choices.
        if setting.reshard is first and _is_open(pricer, priced, promised.rate):
            for other in (o for o in others if _may_reshard(setting.mesh, o)):
                queue.add(replace(setting, reshard=other))
    return best, 0.0


def _nearest(pricer: Pricer, space: Space) -> Priced:
    """What needs least memory, where nothing fits."""
    budget = space.budget_bytes
    tried = [p for p in pricer.tried if p.plan is None and p.setting.budget_bytes == budget]
    if own := [p for p in tried if _is_of(p.setting, space)]:
        return min(own, key=lambda p: p.least_bytes)
    settings = space.settings(space.reshards[:1])
    least = min(settings, key=lambda setting: pricer.bound(setting).least_bytes)
    return Priced(least, None, pricer.bound(least).least_bytes)


def _is_open(pricer: Pricer, priced: Priced, promised: float) -> bool:
    """A plan is so far from its bound that another rule of resharding could be better."""
    return priced.plan is None or pricer.rate(priced) * (1 + FAR) < promised


def _around(pricer: Pricer, space: Space, best: Priced) -> Iterator[Setting]:
    """Other batches and checkpointing with the best's mesh and groups, and less memory."""
    for kind in space.checkpointings:
        for batch in space.batches_on(best.setting.mesh):
            setting = with_batch(replace(best.setting, checkpointing=kind), batch)
            is_cheap = kind is not Checkpointing.AUTO
            if is_cheap and pricer.bound(setting).least_bytes <= space.budget_bytes:
                yield setting
    if best.setting.checkpointing is Checkpointing.AUTO:
        for share in LESS:
            yield replace(best.setting, budget_bytes=int(share * best.peak_bytes))


def front_of(pricer: Pricer, best: Priced, others: Iterable[Priced]) -> list[Priced]:
    """The best, and slower ones that need less memory than all faster ones."""
    found = [best]
    slower = [one for one in others if pricer.rate(one) <= pricer.rate(best)]
    for one in sorted(slower, key=lambda p: (-pricer.rate(p), p.peak_bytes)):
        if one.peak_bytes < found[-1].peak_bytes:
            found.append(one)
    return found


# -- gains -------------------------------------------------------------------------------------


def present_of(subject: Subject, world_size: int, batch: Accumulated) -> Setting | None:
    """What the model does by itself, in FSDP2's own order; None if it was not sharded."""
    if not subject.is_sharded:
        return None
    own = Setting(
        world_size,
        subject.own_shape(world_size) if subject.moves and subject.groupings else None,
        Grouping.AS_IS,
        Resharding.AS_IS,
        Checkpointing.AS_IS,
        batch.sizes,
        scheduling=Scheduling.FSDP2,
    )
    return with_batch(own, batch)


def _reverted(
    subject: Subject, space: Space, best: Setting, present: Setting | None
) -> Iterator[tuple[Decision, Setting]]:
    """By decision, the best setting with what the model would do by itself in its place."""
    if best.mesh is not None:
        yield from _without_tensor(space, best, best.mesh)
        own_mesh = MeshShape(1, best.mesh.data_ranks, best.tensor)
        if present is not None and best.tensor == 1:
            own_mesh = present.mesh or own_mesh
        yield Decision.MESH, replace(best, mesh=own_mesh)
    if subject.groupings is not None:
        kinds = (Grouping.AS_IS, Grouping.BLOCKS, Grouping.WHOLE)
        own = next(kind for kind in kinds if kind in subject.groupings.calls)
        yield Decision.GROUPING, replace(best, grouping=own)
        rule = own_reshard(subject)
        rule = rule if _may_reshard(best.mesh, rule) else Resharding.ALWAYS
        yield Decision.RESHARD, replace(best, reshard=rule)
    else:
        yield Decision.RESHARD, replace(best, reshard=Resharding.AS_IS)
    kind = Checkpointing.AS_IS if subject.checkpoints else Checkpointing.NONE
    yield Decision.CHECKPOINTING, replace(best, checkpointing=kind)
    if present is not None and best.tensor == 1:
        now = Accumulated(present.sizes, present.micro_steps, present.sync_each)
        yield Decision.BATCH, with_batch(best, now)
    elif present is not None:
        yield from ((Decision.BATCH, with_batch(best, b)) for b in _alike(space, best, present))
    if best.checkpointing is not Checkpointing.AUTO:
        yield Decision.SCHEDULING, replace(best, scheduling=Scheduling.FSDP2)


def _without_tensor(
    space: Space, best: Setting, shape: MeshShape
) -> Iterator[tuple[Decision, Setting]]:
    """As many replicas without tensor parallel, and as many tokens in a step."""
    if shape.tensor > 1:
        plain = replace(best, mesh=MeshShape(shape.replicas, shape.shards * shape.tensor))
        for batch in _alike(space, plain, best):
            yield Decision.TENSOR, with_batch(plain, batch)


def _alike(space: Space, own: Setting, other: Setting) -> list[Accumulated]:
    """The batch of `own`'s mesh that is most like `other`'s; none of its size: none."""
    sizes = [b for b in space.batches_on(own.mesh) if b.sizes == other.sizes]
    return sorted(sizes, key=lambda b: b.sync_each != other.sync_each)[:1]


def own_reshard(subject: Subject) -> Resharding:
    """The rule that the model's own calls follow, the root's aside; where each has its own, what
    FSDP2 does where nothing is said."""
    given = {call.reshard_after_forward for call in subject.sharding.calls[:-1]}
    if given == {False}:
        return Resharding.NEVER
    return Resharding.NODE if given == {subject.machines.ranks_per_node} else Resharding.ALWAYS
