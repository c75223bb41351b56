"""What one FSDP2 group would send, read from its own settings as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard.fsdp2.group import FsdpGroup, fsdp_groups
from graphshard.fsdp2.param import FsdpParam
from graphshard.schedule.group_signature import GroupSignature, ParamSignature
from graphshard.schedule.plan import Direction


@dataclass(frozen=True, slots=True)
class MeshRows:
    """Global ranks by process group, over all ranks of a mesh; () where it has no such dimension.

    Read once, since a mesh never changes, and outside the tracing, in which its tensor is no value.
    """

    shards: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]


def mesh_rows(group: FsdpGroup) -> MeshRows:
    info = group.raw.mesh_info
    return MeshRows(
        _ranks(info, "shard_mesh_dim", FSDPMeshInfo),
        _ranks(info, "replicate_mesh_dim", DDPMeshInfo),
    )


def signature_of(group: FsdpGroup, rows: MeshRows) -> GroupSignature:
    """Equal on all ranks that may run the group together in eager FSDP2.

    What only changes a rank's own numbers is left out: casts of activations, offloading, time
    limits.
    """
    raw = group.raw
    return GroupSignature(
        fqn=group.fqn or "(root)",
        shard_ranks=rows.shards,
        replica_ranks=rows.replicas,
        params=tuple(_param(param) for param in group.params),
        divide_factor=raw.gradient_divide_factor,
        sums_only=bool(raw.force_sum_reduction_for_comms),
        reshard=_reshard(group),
        reshard_after_backward=group.reshard_after_backward,
        unshard_in_backward=bool(raw.unshard_in_backward),
        reduces=group.reduces,
        all_reduces=group.all_reduces,
        reduces_unused=group.reduces_unused,
        all_gather=type(group.gather_comm).__qualname__,
        reduce_scatter=type(group.reduce_comm).__qualname__,
        hooked=group.has_all_reduce_hook,
        forward_prefetch=_names(group.prefetches(Direction.FORWARD)),
        backward_prefetch=_names(group.prefetches(Direction.BACKWARD)),
    )


def _param(param: FsdpParam) -> ParamSignature:
    reduced_as = param.raw.reduce_dtype
    return ParamSignature(
        fqn=param.fqn,
        size=param.size,
        shard_dim=param.shard_dim,
        kind=type(param.raw._sharded_local_tensor).__qualname__,
        dtype=_dtype(param.sharded.dtype),
        gathered_as=_dtype(param.dtype),
        reduced_as="" if reduced_as is None else _dtype(reduced_as),
        trained=param.sharded.requires_grad,
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks(mesh_info: Any, dim_name: str, kind: type) -> tuple[tuple[int, ...], ...]:
    dim = getattr(mesh_info, dim_name) if isinstance(mesh_info, kind) else None
    if dim is None:
        return ()
    mesh: Tensor = mesh_info.mesh.mesh
    rows = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
    return tuple(map(tuple, rows))


def _reshard(group: FsdpGroup) -> bool | int:
    smaller = group.post_forward_process_group
    return group.reshard_after_forward if smaller is None else smaller.size()


def _names(states: Sequence[FSDPState]) -> tuple[str, ...]:
    return tuple(group.fqn or "(root)" for state in states for group in fsdp_groups(state))
