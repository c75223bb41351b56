"""Tensor parallel of a model under tuning: which degrees it can have, and what steps then cost.

A degree is the number of ranks of one tensor-parallel group. In: the subject, with its plan for
tensor parallel. Out: a `ShortStudy` for each degree that could be captured, and a typed reason for
each that could not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.fsdp2.undo import undo
from graphshard.offline.counted import CostsKey
from graphshard.offline.repeats import signature
from graphshard.offline.target import Sizes
from graphshard.offline.world import Made, built, pretended
from graphshard.pricing.op_costs import GraphCosts
from graphshard.schedule.setting import Checkpointing, MeshShape, NoTensor, TensorObstacle
from graphshard.tune.aside import side_by_side
from graphshard.tune.layout import meshes_of
from graphshard.tune.short_study import ShortStudy
from graphshard.tune.tensor_parallel import (
    NoTensorError,
    TensorPlan,
    are_planned_alike,
    obstacle_in,
    parallelize,
    plan_of,
)

if TYPE_CHECKING:
    from graphshard.tune.subject import Subject

# So many batches, the smallest, are tried with tensor parallel: each is a capture.
MOST_SIZES = 1


@dataclass(slots=True)
class Degrees:
    """asked: degrees to try; None: powers of two up to a node. plan: None where the model has none,
    or none that could be searched."""

    asked: tuple[int, ...] | None = None
    plan: TensorPlan | None = None
    _reasons: list[NoTensor] = field(default_factory=list)
    _studies: dict[tuple[Checkpointing, int], ShortStudy | None] = field(default_factory=dict)

    def look_at(self, model: nn.Module) -> None:
        """model: without shards."""
        self.plan = plan_of(model)
        found = obstacle_in(self.plan) if self.plan is not None else None
        self._reasons = []
        if found is not None:
            self.plan, self._reasons = None, [found]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Raises NoTensorError, or what the plan raises."""
        assert self.plan is not None
        parallelize(model, self.plan, mesh)

    def possible(self, subject: Subject, world_size: int) -> tuple[int, ...]:
        """1, and those that groups of neighbours on a node can have."""
        if self.plan is None:
            return (1,)
        per_node = subject.machines.ranks_per_node
        powers = [2**n for n in range(1, per_node.bit_length())]
        asked = sorted(set(powers if self.asked is None else self.asked) - {1})
        fitting = [t for t in asked if per_node % t == 0 and world_size % t == 0 and world_size > t]
        self._capture(subject, fitting, world_size)
        return 1, *(t for t in fitting if self._studies[Checkpointing.AS_IS, t] is not None)

    @property
    def left_out(self) -> tuple[NoTensor, ...]:
        """Why degrees are not searched."""
        by_reason: dict[tuple[TensorObstacle, str], tuple[int, ...]] = {}
        for one in self._reasons:
            key = one.why, one.what
            by_reason[key] = (*by_reason.get(key, ()), *one.degrees)
        return tuple(NoTensor(*key, degrees) for key, degrees in by_reason.items())

    def study(self, kind: Checkpointing, degree: int) -> ShortStudy | None:
        """kind: AS_IS or FULL. degree: a possible one."""
        return self._studies[kind, degree]

    def _capture(self, subject: Subject, degrees: Sequence[int], world_size: int) -> None:
        """Those that were not captured yet, side by side."""
        new = [t for t in degrees if (Checkpointing.AS_IS, t) not in self._studies]
        if not new:
            return
        kinds = [Checkpointing.AS_IS, *([Checkpointing.FULL] if subject.may_checkpoint else [])]
        works = [partial(self._tried, subject, kinds, t, world_size) for t in new]
        for degree, found in zip(new, side_by_side(works), strict=True):
            if isinstance(found, NoTensor):
                self._reasons.append(found)
                self._studies[Checkpointing.AS_IS, degree] = None
                continue
            for kind, costs in found.items():
                study = self._study(subject, kind, degree, world_size)
                self._studies[kind, degree] = replace(study, known=costs)

    def _tried(
        self, subject: Subject, kinds: Sequence[Checkpointing], degree: int, world_size: int
    ) -> dict[Checkpointing, dict[CostsKey, GraphCosts]] | NoTensor:
        """What a step costs with this degree, or why it is not searched."""
        subject.say(f"capturing it with tensor parallel over {degree} ranks")
        try:
            subject.finest(world_size, MeshShape(1, world_size))  # which finds what repeats
            self._check_blocks(subject, MeshShape(1, world_size // degree, degree))
            return {kind: self._costs(subject, kind, degree, world_size) for kind in kinds}
        except NoTensorError as error:
            return replace(error.found, degrees=(degree,))
        except Exception as error:  # a plan is the user's code, and was perhaps never tried
            subject.say(f"with that it cannot be captured: {error}")
            return NoTensor(TensorObstacle.CAPTURE, degrees=(degree,))

    def _costs(
        self, subject: Subject, kind: Checkpointing, degree: int, world_size: int
    ) -> dict[CostsKey, GraphCosts]:
        """Raises what stands in the way of it."""
        study = self._study(subject, kind, degree, world_size)
        for sizes in tensor_sizes(subject.sizes):
            point = subject.point(sizes, world_size)
            for freed in (False, *([True] if study.may_free(point) else [])):
                study.costs(point, freed=freed)
        return study.known

    def _study(
        self, subject: Subject, kind: Checkpointing, degree: int, world_size: int
    ) -> ShortStudy:
        shape = MeshShape(1, world_size // degree, degree)
        infos = [own.info for own in subject.finest(world_size, shape).values()]
        full, counts = kind is Checkpointing.FULL, subject.counts_blocks
        build = partial(subject.sharded, shape=shape, full=full, count=0 if counts else None)
        repeats = subject.repeats if counts else ()
        return ShortStudy(subject.name, build, world_size, repeats, infos)

    def _check_blocks(self, subject: Subject, shape: MeshShape) -> None:
        """All alike blocks have to be parallelized alike: a few stand for them. Raises
        NoTensorError."""
        assert self.plan is not None
        alike = (
            partial(are_planned_alike, self.plan)
            if self.plan.styles is not None
            else self._built_alike(subject, shape)
        )
        for repeat in subject.repeats:
            if not alike(repeat.names):
                raise NoTensorError(NoTensor(TensorObstacle.UNLIKE, repeat.container))

    def _built_alike(self, subject: Subject, shape: MeshShape) -> Callable[[Sequence[str]], bool]:
        """Of a function it is not known what it does before it has."""

        def build() -> Made:
            made = subject.build(subject.sizes[0])
            undo(made.model)
            mesh = meshes_of(shape).tensor
            assert mesh is not None
            self.parallelize(made.model, mesh)
            return made

        with pretended(shape.data_ranks * shape.tensor):
            model = built(build).model
        return lambda names: len({signature(model.get_submodule(name)) for name in names}) == 1


def tensor_sizes(every: tuple[Sizes, ...]) -> tuple[Sizes, ...]:
    """Of all sizes, those with the batches that are tried with tensor parallel."""
    return tuple(sorted(every, key=lambda own: dict(own)["batch"])[:MOST_SIZES])
