"""FSDP1's process groups in, the DeviceMesh of `fully_shard` out, with the line that makes it.

A mesh has one dimension (sharded over it), or two: replicated over the first, sharded over the
second. Ranks of a group keep their order, so that each rank holds the shard it would hold in FSDP1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from graphshard.errors import MigrateError
from graphshard.migrate.arguments import HYBRID, Arguments

DIMS = ("replicate", "shard")


@dataclass(frozen=True, slots=True)
class Placed:
    """A mesh, and the line that makes it as `mesh`; None: what `fully_shard` takes by default."""

    mesh: DeviceMesh
    line: str | None


def device_type_of(arguments: Arguments) -> str:
    """The type of device that is sharded on: of the mesh, of `device_id`, or the accelerator.

    Raises MigrateError (GS1005) if `device_id` is not the current device.
    """
    if arguments.device_mesh is not None:
        found = arguments.device_mesh.device_type
    elif isinstance(arguments.device_id, torch.device):
        found = arguments.device_id.type
    else:
        found = _accelerator()
    _check_device(arguments.device_id, found)
    return str(found)


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _check_device(device_id: int | torch.device | None, device_type: str) -> None:
    index = device_id.index if isinstance(device_id, torch.device) else device_id
    if isinstance(device_id, torch.device) and device_id.type != device_type:
        raise MigrateError(
            "GS1005", f"device_id={device_id} is not on the {device_type} of device_mesh"
        )
    if index is None or (device_type == "cpu" and isinstance(device_id, torch.device)):
        return
    if device_type == "cpu":
        raise MigrateError(
            "GS1005",
            f"device_id={device_id}, but no accelerator is available; on a CPU, leave it out",
        )
    current = torch.accelerator.current_device_index()
    if index != current:
        raise MigrateError(
            "GS1005",
            f"device_id={device_id}, but the current device is {device_type}:{current}, and FSDP2 "
            f"uses the current one: call torch.accelerator.set_device_index({index}) first",
        )


def mesh_for(arguments: Arguments, device_type: str, *, has_policy: bool) -> Placed:
    """The mesh that FSDP1's `process_group`, `device_mesh` and strategy stand for.

    has_policy: FSDP1 makes groups for hybrid strategies only where one call shards the whole
    model. All ranks have to call this together. Raises MigrateError (GS1004).
    """
    group, mesh, strategy = (
        arguments.process_group,
        arguments.device_mesh,
        arguments.sharding_strategy,
    )
    if group is not None and mesh is not None:
        raise MigrateError("GS1004", "process_group= and device_mesh= were both given; keep one")
    if strategy in HYBRID:
        return _hybrid(group, mesh, device_type, has_policy)
    if isinstance(group, (tuple, list)):
        raise MigrateError(
            "GS1004", f"a pair of process groups is for {' and '.join(s.name for s in HYBRID)}"
        )
    if strategy is ShardingStrategy.NO_SHARD:
        return _replicated(group, mesh, device_type)
    if mesh is not None:
        if mesh.ndim != 1:
            raise MigrateError(
                "GS1004",
                f"device_mesh= has {mesh.ndim} dimensions; HYBRID_SHARD takes two, others one "
                '(device_mesh["dp"])',
            )
        return Placed(mesh, "mesh = device_mesh  # as given")
    if group is not None:
        return Placed(
            DeviceMesh.from_group(group, device_type),
            f'mesh = DeviceMesh.from_group(process_group, "{device_type}")',
        )
    return _made(device_type, (dist.get_world_size(),), is_default=device_type == _accelerator())


def _hybrid(group: Any, mesh: DeviceMesh | None, device_type: str, has_policy: bool) -> Placed:
    if mesh is not None:
        if mesh.ndim != 2:
            raise MigrateError(
                "GS1004", f"HYBRID_SHARD takes a device_mesh of two dimensions, not {mesh.ndim}"
            )
        return Placed(mesh, "mesh = device_mesh  # as given")
    if group is not None:
        return _of_pair(group, device_type)
    if not has_policy:
        raise MigrateError(
            "GS1004",
            "HYBRID_SHARD without auto_wrap_policy needs one mesh for all calls: pass "
            f'device_mesh=init_device_mesh("{device_type}", (nodes, ranks_per_node))',
        )
    world, node = dist.get_world_size(), _ranks_per_node(device_type)
    if world % node:
        raise MigrateError(
            "GS1004", f"{world} ranks are no whole number of nodes of {node}; pass device_mesh="
        )
    return _made(device_type, (world // node, node))


def _ranks_per_node(device_type: str) -> int:
    """As FSDP1: the node's devices. A CPU hosts as many ranks as torchrun started there."""
    if device_type != "cpu":
        return torch.accelerator.device_count()
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _of_pair(pair: Any, device_type: str) -> Placed:
    groups = tuple(pair) if isinstance(pair, (tuple, list)) else ()
    if len(groups) != 2 or not all(isinstance(g, dist.ProcessGroup) for g in groups):
        raise MigrateError(
            "GS1004", "HYBRID_SHARD takes process_group=(shard_group, replicate_group)"
        )
    shard, replicate = groups
    columns: list[list[int]] = [[] for _ in range(dist.get_world_size(shard))]
    dist.all_gather_object(columns, dist.get_process_group_ranks(replicate), group=shard)
    ranks = torch.tensor(columns).T.contiguous()
    return Placed(
        DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=DIMS),
        f'mesh = DeviceMesh.from_group([replicate_group, shard_group], "{device_type}", '
        f"mesh={ranks.tolist()}, mesh_dim_names={DIMS})",
    )


def _replicated(group: Any, mesh: DeviceMesh | None, device_type: str) -> Placed:
    given = group if mesh is None or mesh.ndim != 1 else mesh.get_group()
    world = dist.get_world_size()
    if (mesh is not None and mesh.ndim != 1) or (
        given is not None and dist.get_world_size(given) != world
    ):
        raise MigrateError(
            "GS1004",
            "NO_SHARD over a part of the ranks has no equivalent here: use "
            "DistributedDataParallel(model, process_group=...)",
        )
    return _made(device_type, (world, 1))


def _made(device_type: str, shape: tuple[int, ...], *, is_default: bool = False) -> Placed:
    dims = None if len(shape) == 1 else DIMS
    names = "" if dims is None else f", mesh_dim_names={dims}"
    line = f'mesh = init_device_mesh("{device_type}", {shape}{names})'
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=dims)
    return Placed(mesh, None if is_default else line)
