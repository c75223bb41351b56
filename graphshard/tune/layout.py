"""Shards a model anew: meshes and `fully_shard` calls as a setting has them.

In: a model without shards, what its own calls were given, and the calls to make. Each call takes
the policies of what it shards, so that a call never joins what had different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from graphshard.fsdp2.undo import Sharding, ShardingCall
from graphshard.pricing.op_costs import GraphCosts
from graphshard.schedule.setting import MeshShape, Resharding
from graphshard.tune.modules import Calls, Modules, owner_of

DIMS = ("replicate", "shard")
# Beside tensor parallel, and that.
DATA, TENSOR = "dp", "tp"
# What a model without any gets: the usual ones of training in float32.
USUAL = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Policies:
    """What one call is given besides modules, mesh and resharding."""

    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policies) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        # Policies of torch are compared by what they say, and so is a subclass of OffloadPolicy.
        return self.mixed_precision, type(self.offload), str(self.offload)


def plain_name(name: str) -> str:
    """Without checkpoint wrappers, through which names lead all the same."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in model.named_parameters():
        yield plain_name(name), param


def policies_of(model: nn.Module, sharding: Sharding, calls: Calls) -> dict[Modules, Policies]:
    """Of each call that has parameters; without those that would join different ones."""
    by_param = {name: call for call in sharding.calls for name in call.params}
    found: dict[Modules, set[Policies]] = {}
    for name, param in named_params(model):
        modules = owner_of(name, calls)
        if modules is not None and name not in sharding.whole:
            found.setdefault(modules, set()).add(_policies(by_param.get(name), param))
    return {modules: own.pop() for modules, own in found.items() if len(own) == 1}


def _policies(call: ShardingCall | None, param: nn.Parameter) -> Policies:
    if call is not None:
        return Policies(call.mixed_precision, call.offload)
    default = USUAL if param.dtype is torch.float32 else MixedPrecisionPolicy()
    return Policies(default, OffloadPolicy())


def shards_alike(model: nn.Module, sharding: Sharding, calls: Calls) -> bool:
    """No call would join what had different policies."""
    own = {owner_of(name, calls) for name, _ in named_params(model)
           if name not in sharding.whole}  # fmt: skip
    return own - {None} == policies_of(model, sharding, calls).keys()


def shard(
    model: nn.Module,
    sharding: Sharding,
    calls: Calls,
    common: DeviceMesh | None,
    reshard: Resharding = Resharding.OPEN,
    ranks_per_node: int = 0,
) -> None:
    """common: mesh of all calls; None takes those of the model's own. The last call is the root's.

    Raises what `fully_shard` raises.
    """
    policies = policies_of(model, sharding, calls)
    meshes = {name: call.mesh for call in sharding.calls for name in call.params}
    params = dict(named_params(model))
    names = {modules: [] for modules in calls}  # type: dict[Modules, list[str]]
    for name in params:
        if (own := owner_of(name, calls)) is not None:
            names[own].append(name)
    ignored = {params[name] for name in sharding.whole if name in params}
    dims = {params[name]: dim for name, dim in sharding.dims if name in params}
    root = policies.get(calls[-1]) or next(iter(policies.values()))
    for modules in calls:
        own_policies = policies.get(modules, root)
        keeps = None if modules == calls[-1] else argument(reshard, ranks_per_node)
        own_mesh = next((meshes[n] for n in names[modules] if n in meshes), None)
        fully_shard(
            _modules(model, modules),
            mesh=common or own_mesh or _any(sharding.calls),
            reshard_after_forward=keeps,
            shard_placement_fn=_placement(dims) if dims else None,
            mp_policy=own_policies.mixed_precision,
            offload_policy=own_policies.offload,
            ignored_params=ignored or None,
        )


def _any(calls: Sequence[ShardingCall]) -> DeviceMesh | None:
    return next((call.mesh for call in calls if call.mesh is not None), None)


def _modules(model: nn.Module, names: Modules) -> nn.Module | list[nn.Module]:
    found = [model.get_submodule(name) for name in names]
    return found[0] if len(found) == 1 else found


def _placement(dims: dict[nn.Parameter, int]) -> Callable[[nn.Parameter], Shard]:
    return lambda param: Shard(dims.get(param, 0))


def argument(reshard: Resharding, ranks_per_node: int) -> bool | int | None:
    """`reshard_after_forward` of all calls but the root's."""
    if reshard is Resharding.NODE:
        return ranks_per_node
    return {Resharding.ALWAYS: True, Resharding.NEVER: False}.get(reshard)


def dims_of(shape: MeshShape) -> dict[str, int]:
    """The dims of its mesh, by name, in order; one dim needs none."""
    if shape.tensor == 1:
        return dict(zip(DIMS, (shape.replicas, shape.shards), strict=True))
    data = {DATA: shape.shards}
    if shape.replicas > 1:
        data = dict(zip(DIMS, (shape.replicas, shape.shards), strict=True))
    return {**data, TENSOR: shape.tensor}


@dataclass(frozen=True, slots=True)
class Meshes:
    """tensor: None without tensor parallel."""

    data: DeviceMesh
    tensor: DeviceMesh | None = None


def meshes_of(shape: MeshShape) -> Meshes:
    """Over all ranks."""
    if shape.replicas == shape.tensor == 1:
        return Meshes(init_device_mesh("cpu", (shape.shards,)))
    dims = dims_of(shape)
    whole = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    if shape.tensor == 1:
        return Meshes(whole)
    return Meshes(whole[data_dims(shape)], whole[TENSOR])


def data_dims(shape: MeshShape) -> str | tuple[str, ...]:
    """By which the mesh of all ranks yields that of FSDP2, beside tensor parallel."""
    return DATA if shape.replicas == 1 else DIMS


def group_name(modules: Modules) -> str:
    """As FSDP2 and plans name the group of a call."""
    return ", ".join(modules) or "(root)"


def checkpointed(model: nn.Module, name: str) -> None:
    """The module computes its activations again in backward."""
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent).register_module(own, checkpoint_wrapper(model.get_submodule(name)))


def shape_of(meshes: Sequence[DeviceMesh], world_size: int) -> MeshShape | None:
    """Of one mesh of all ranks, in their order; None for anything else."""
    shapes = {tuple(mesh.shape) for mesh in meshes}
    if len(shapes) != 1 or meshes[0].size() != world_size or meshes[0].ndim > 2:
        return None
    if any(mesh.mesh.flatten().tolist() != list(range(world_size)) for mesh in meshes):
        return None
    *replicas, shards = shapes.pop()
    return MeshShape(replicas[0] if replicas else 1, shards)


def shapes_for(world_size: int, ranks_per_node: int, tensor: int = 1) -> Iterator[MeshShape]:
    """FSDP over all ranks, and HSDP over whole nodes; beside tensor parallel of several shards."""
    yield MeshShape(1, world_size // tensor, tensor)
    nodes, rest = divmod(world_size, ranks_per_node)
    for count in range(1, nodes):
        shards = ranks_per_node * count // tensor
        if not rest and nodes % count == 0 and (shards > 1 or tensor == 1):
            yield MeshShape(nodes // count, shards, tensor)


def unwrapped(costs: GraphCosts) -> GraphCosts:
    """With the names that groups have without checkpoint wrappers."""
    groups = tuple(replace(group, fqn=plain_name(group.fqn)) for group in costs.groups)
    return replace(costs, groups=groups)
