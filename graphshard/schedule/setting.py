"""What of a sharded model can be set, as plain values: one `Setting` is one way to run a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class MeshShape:
    """Data parallel over `replicas` x `shards` ranks: the model is sharded over `shards` of them
    (neighbours), and each of the replicas has all of it. One replica: FSDP; several: HSDP."""

    replicas: int
    shards: int


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
    """mesh: None for that of the model's own calls. sizes: of one rank's inputs in a micro-step, by
    name; a step has micro_steps of them. sync_each: each of these reduces its gradients, not the
    last one alone. budget_bytes: for the planner."""

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


class Obstacle(StrEnum):
    """Why a model keeps the `fully_shard` calls that it has."""

    REPLICATES = "replicates"  # `replicate` of FSDP2
    MESHES = "meshes"  # a call spreads parameters over several meshes
    SUBCLASSES = "subclasses"  # parameters are of a tensor subclass, or have extensions
    METHODS = "methods"  # `register_fsdp_forward_method`
    ROOTS = "roots"  # several sharded modules are outermost
    CAPTURE = "capture"  # with other groups it is not one graph


class Decision(StrEnum):
    """The parts of a setting that can be told apart in what they gain."""

    MESH = "mesh"
    GROUPING = "grouping"
    RESHARD = "reshard"
    CHECKPOINTING = "checkpointing"
    BATCH = "batch"
    SCHEDULING = "scheduling"
