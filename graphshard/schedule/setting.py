"""What of a sharded model can be set, as plain values: one `Setting` is one way to run a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class MeshShape:
    """Data parallel over `replicas` x `shards`: the model is sharded over `shards` of them, and
    each of the replicas has all of it. One replica: FSDP; several: HSDP. Each is one rank, or
    `tensor` ranks, neighbours on a node, among which tensor parallel divides the model first."""

    replicas: int
    shards: int
    tensor: int = 1

    @property
    def data_ranks(self) -> int:
        """How many have batches of their own."""
        return self.replicas * self.shards


class Grouping(StrEnum):
    """Which modules are groups."""

    AS_IS = "as it is"
    BLOCKS = "blocks"  # each block, and the rest with the model
    APART = "apart"  # the same, with large modules outside of blocks (embedding, head) alone
    PAIRS = "pairs"  # two neighbouring blocks
    QUADS = "quads"
    WHOLE = "whole"  # one group


NEIGHBOURS = {Grouping.PAIRS: 2, Grouping.QUADS: 4}


class Resharding(StrEnum):
    """What becomes of gathered parameters after forward; of all groups but the root's."""

    AS_IS = "as it is"
    OPEN = "open"  # the planner says it of each group
    ALWAYS = "always"
    NEVER = "never"
    NODE = "node"  # the ranks of a node hold them among them


class Checkpointing(StrEnum):
    """What backward computes again."""

    AS_IS = "as it is"
    NONE = "none"
    AUTO = "auto"  # what the planner chooses, as the budget needs
    FULL = "full"  # each block


class Scheduling(StrEnum):
    """Who orders collectives and waits."""

    PLANNED = "planned"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True)
class Setting:
    """mesh: None for that of the model's own calls. sizes: of one rank's inputs in a micro-step (of
    a tensor-parallel group's, who share them), by name; a step has micro_steps of them. sync_each:
    each of these reduces its gradients, not the last one alone. budget_bytes: for the planner."""

    world_size: int
    mesh: MeshShape | None
    grouping: Grouping
    reshard: Resharding
    checkpointing: Checkpointing
    sizes: tuple[tuple[str, int], ...]
    micro_steps: int = 1
    sync_each: bool = True
    scheduling: Scheduling = Scheduling.PLANNED
    budget_bytes: int | None = None

    @property
    def tensor(self) -> int:
        """Ranks of one tensor-parallel group, beside what the model's own calls have."""
        return 1 if self.mesh is None else self.mesh.tensor


class Obstacle(StrEnum):
    """Why a model keeps the `fully_shard` calls that it has."""

    REPLICATES = "replicates"  # `replicate` of FSDP2
    MESHES = "meshes"  # a call spreads parameters over several meshes
    SUBCLASSES = "subclasses"  # parameters are of a tensor subclass, or have extensions
    METHODS = "methods"  # `register_fsdp_forward_method`
    ROOTS = "roots"  # several sharded modules are outermost
    CAPTURE = "capture"  # with other groups it is not one graph


class TensorObstacle(StrEnum):
    """Why a model is searched without the tensor parallel that it has a plan for."""

    STYLE = "style"  # a word that names no style of torch
    NAME = "name"  # it names no module of the model
    TIED = "tied"  # it would part a parameter that several modules share
    UNEVEN = "uneven"  # ranks would have unequal parts of a parameter
    UNLIKE = "unlike"  # blocks that are alike would no longer be
    CAPTURE = "capture"  # with it the model cannot be built or captured


@dataclass(frozen=True, slots=True)
class NoTensor:
    """what: the style, the name of a module or of a parameter. degrees: those that are not
    searched; empty: all."""

    why: TensorObstacle
    what: str = ""
    degrees: tuple[int, ...] = ()


class Decision(StrEnum):
    """The parts of a setting that can be told apart in what they gain."""

    TENSOR = "tensor"
    MESH = "mesh"
    GROUPING = "grouping"
    RESHARD = "reshard"
    CHECKPOINTING = "checkpointing"
    BATCH = "batch"
    SCHEDULING = "scheduling"
