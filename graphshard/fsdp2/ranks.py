"""The ranks of a group, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.fsdp2.group import FsdpGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """A data-parallel mesh. parts: over how many ranks parameters are sharded."""

    parts: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


def ranks_of(group: FsdpGroup) -> Ranks:
    mesh = group.raw.mesh_info.mesh.mesh
    return Ranks(group.world_size, tuple(mesh.shape), tuple(mesh.flatten().tolist()))
