"""The best setting of each number of GPUs, and the front around it.

Settings are bounded first; then those that could still be the best are planned, the most promising
first, until no bound is TOLERANCE better than the best plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from graphshard.offline.target import Sizes
from graphshard.tune.pricing import Priced, Pricer
from graphshard.tune.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    Reshard,
    Scheduling,
    Setting,
)
from graphshard.tune.subject import Subject, shapes_for

# Less than this is no reason to plan one more setting.
TOLERANCE = 0.01
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
class Space:
    """What is searched for one number of GPUs."""

    world_size: int
    shapes: tuple[MeshShape | None, ...]
    groupings: tuple[Grouping, ...]
    reshards: tuple[Reshard, ...]
    checkpointings: tuple[Checkpointing, ...]
    batches: tuple[tuple[Sizes, int], ...]
    budget_bytes: int

    def settings(self, reshards: Sequence[Reshard] | None = None) -> Iterator[Setting]:
        for shape in self.shapes:
            for grouping in self.groupings:
                for reshard in self.reshards if reshards is None else reshards:
                    for kind in self.checkpointings:
                        for sizes, micro_steps in self.batches:
                            yield Setting(
                                self.world_size, shape, grouping, reshard, kind, sizes, micro_steps,
                                budget_bytes=self.budget_bytes,
                            )  # fmt: skip

    @property
    def size(self) -> int:
        return sum(1 for _ in self.settings())


@dataclass(frozen=True, slots=True)
class Gain:
    """What the best setting gains by one decision: without it, it would be `without`."""

    decision: Decision
    best: Priced
    without: Priced


@dataclass(frozen=True, slots=True)
class Found:
    """For one number of GPUs. present: what the model does by itself, None if it was not sharded.
    best: None if nothing fits, then `nearest` is the setting that needs least. front: no other is
    faster and smaller; the fastest first. left: of what was not planned, how much faster than the
    best the most promising one can be at most, as a share."""

    world_size: int
    present: Priced | None
    best: Priced | None
    front: tuple[Priced, ...] = ()
    gains: tuple[Gain, ...] = ()
    num_settings: int = 0
    left: float = 0.0
    nearest: Priced | None = None


def space_of(subject: Subject, world_size: int, asked: Asked) -> Space:
    groupings, costs = subject.groupings, subject.costs[asked.batches[0]]
    shapes: tuple[MeshShape | None, ...] = (None,)
    if groupings is not None and subject.moves:
        shapes = tuple(shapes_for(world_size, subject.machines.ranks_per_node))
    kinds = [Checkpointing.AS_IS] if costs.free is not None else []
    kinds += [Checkpointing.AUTO]
    kinds += [Checkpointing.FULL] if costs.full is not None else []
    reshards = [Reshard.OPEN]
    if groupings is not None:
        reshards += [Reshard.ALWAYS, Reshard.NEVER]
        if world_size > subject.machines.ranks_per_node:
            reshards.append(Reshard.NODE)
    return Space(
        world_size,
        shapes,
        tuple(groupings.calls) if groupings is not None else (Grouping.AS_IS,),
        tuple(reshards),
        tuple(kinds),
        tuple(batches_for(subject, world_size, asked)),
        asked.budget_bytes,
    )


def batches_for(
    subject: Subject, world_size: int, asked: Asked
) -> Iterator[tuple[Sizes, int]]:
    """Sizes of a micro-step, and how many of them a step has."""
    for sizes in asked.batches:
        if asked.batch_tokens is None:
            yield sizes, 1
            continue
        own = dict(sizes)
        tokens = own["batch"] * own["seq"] * subject.data_ranks(world_size)
        if asked.batch_tokens % tokens == 0:
            yield sizes, asked.batch_tokens // tokens


def found_for(
    subject: Subject, pricer: Pricer, space: Space, present: Setting | None
) -> Found:
    """The best setting of `space`, and what is around it."""
    now = None if present is None else pricer.price(present)
    best, left, least = _best(pricer, space)
    if best is None:
        nearest = None if least is None else Priced(least, None, pricer.bound(least).least_bytes)
        return Found(space.world_size, now, None, num_settings=space.size, nearest=nearest)
    around = [pricer.price(setting) for setting in _around(pricer, space, best)]
    own = [p for p in pricer.fitting if _is_of(p.setting, space)]
    return Found(
        space.world_size,
        now,
        best,
        tuple(front_of(pricer, [best, *own, *(p for p in around if p.plan is not None)])),
        tuple(_gains(subject, pricer, best, present)),
        space.size,
        left,
    )


def _is_of(setting: Setting, space: Space) -> bool:
    return (
        setting.world_size == space.world_size
        and setting.scheduling is Scheduling.PLANNED
        and setting.checkpointing is not Checkpointing.NONE
    )


def _best(pricer: Pricer, space: Space) -> tuple[Priced | None, float, Setting | None]:
    """The best, what is left (see `Found`), and the setting that needs least memory."""
    first, others = space.reshards[:1], space.reshards[1:]
    heap: list[tuple[float, int, Setting]] = []
    least: Setting | None = None
    for number, setting in enumerate(space.settings(first)):
        bound = pricer.bound(setting)
        if least is None or bound.least_bytes < pricer.bound(least).least_bytes:
            least = setting
        if bound.least_bytes <= space.budget_bytes:
            heap.append((-pricer.tokens_per_s(setting, bound.step_us), number, setting))
    heapify(heap)
    best: Priced | None = None
    while heap:
        promised, number, setting = heappop(heap)
        reached = 0.0 if best is None else pricer.tokens_per_s(best.setting, best.step_us)
        if -promised <= reached * (1 + TOLERANCE):
            return best, max(0.0, -promised / reached - 1), least
        priced = pricer.price(setting)
        if priced.plan is None:
            if best is None and least is not None:
                bound = pricer.bound(setting).least_bytes
                least = setting if bound < pricer.bound(least).least_bytes else least
        elif pricer.tokens_per_s(setting, priced.step_us) > reached:
            best = priced
        # What is not resharded by the planner is no better than its bound, unless that is far away.
        if setting.reshard is first[0] and _is_open(pricer, priced, promised):
            for place, reshard in enumerate(others, start=1):
                other = replace(setting, reshard=reshard)
                bound_us = pricer.bound(other)
                if bound_us.least_bytes <= space.budget_bytes:
                    tokens = pricer.tokens_per_s(other, bound_us.step_us)
                    heappush(heap, (-tokens, number + place * space.size, other))
    return best, 0.0, least


def _is_open(pricer: Pricer, priced: Priced, promised: float) -> bool:
    """A plan is so far from its bound that another rule of resharding could be better."""
    if priced.plan is None:
        return True
    return pricer.tokens_per_s(priced.setting, priced.step_us) * (1 + TOLERANCE) < -promised


def _around(pricer: Pricer, space: Space, best: Priced) -> Iterator[Setting]:
    """Other batches and checkpointing with the best's mesh and groups, and less memory."""
    for kind in space.checkpointings:
        for sizes, micro_steps in space.batches:
            setting = replace(
                best.setting, checkpointing=kind, sizes=sizes, micro_steps=micro_steps
            )
            is_cheap = kind is not Checkpointing.AUTO
            if is_cheap and pricer.bound(setting).least_bytes <= space.budget_bytes:
                yield setting
    if best.setting.checkpointing is Checkpointing.AUTO:
        for share in LESS:
            yield replace(best.setting, budget_bytes=int(share * best.peak_bytes))


def front_of(pricer: Pricer, priced: Iterable[Priced]) -> list[Priced]:
    """Those that no other beats in tokens per second and memory, the fastest first."""
    found: list[Priced] = []
    every = {one.setting: one for one in priced}.values()
    for one in sorted(
        every, key=lambda p: (-pricer.tokens_per_s(p.setting, p.step_us), p.peak_bytes)
    ):
        if not found or one.peak_bytes < found[-1].peak_bytes:
            found.append(one)
    return found


# -- gains -------------------------------------------------------------------------------------


def present_of(subject: Subject, world_size: int, sizes: Sizes, micro_steps: int) -> Setting | None:
    """What the model does by itself, in FSDP2's own order; None if it was not sharded."""
    if not subject.is_sharded:
        return None
    shape = subject.own_shape(world_size) if subject.moves and subject.groupings else None
    return Setting(
        world_size, shape, Grouping.AS_IS, Reshard.AS_IS, Checkpointing.AS_IS, sizes, micro_steps,
        Scheduling.FSDP2,
    )  # fmt: skip


def _gains(
    subject: Subject, pricer: Pricer, best: Priced, present: Setting | None
) -> Iterator[Gain]:
    """Each decision taken back by itself."""
    for decision, changes in _reverts(subject, best.setting, present).items():
        other = replace(best.setting, **changes)
        if other != best.setting:
            yield Gain(decision, best, pricer.price(other))


def _reverts(
    subject: Subject, best: Setting, present: Setting | None
) -> Mapping[Decision, Mapping[str, object]]:
    """By decision, what the model would do by itself in its place."""
    found: dict[Decision, dict[str, object]] = {}
    groupings = subject.groupings
    fsdp = None if best.mesh is None else MeshShape(1, best.world_size)
    found[Decision.MESH] = {"mesh": fsdp if present is None else present.mesh}
    if groupings is not None:
        kinds = (Grouping.AS_IS, Grouping.BLOCKS, Grouping.WHOLE)
        found[Decision.GROUPING] = {
            "grouping": next(kind for kind in kinds if kind in groupings.calls)
        }
        found[Decision.RESHARD] = {"reshard": own_reshard(subject)}
    elif present is not None:
        found[Decision.RESHARD] = {"reshard": Reshard.AS_IS}
    checkpoints = subject.costs[best.sizes].free is not None
    found[Decision.CHECKPOINTING] = {
        "checkpointing": Checkpointing.AS_IS if checkpoints else Checkpointing.NONE
    }
    if present is not None:
        found[Decision.BATCH] = {"sizes": present.sizes, "micro_steps": present.micro_steps}
    if best.checkpointing is not Checkpointing.AUTO:
        found[Decision.SCHEDULING] = {"scheduling": Scheduling.FSDP2}
    return found


def own_reshard(subject: Subject) -> Reshard:
    """The rule that the model's own calls follow, the root's aside; where each has its own, what
    FSDP2 does where nothing is said."""
    given = {call.reshard_after_forward for call in subject.sharding.calls[:-1]}
    if given == {False}:
        return Reshard.NEVER
    return Reshard.NODE if given == {subject.machines.ranks_per_node} else Reshard.ALWAYS
