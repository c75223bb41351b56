"""Takes `fully_shard` back from a model whose tensors hold no data.

In: a sharded model on the meta device, before its first call. Out: what each `fully_shard` call was
given, as plain facts; the model is as it was before them, parameters of tensor parallel included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphshard.fsdp2.extensions import has_extensions
from graphshard.fsdp2.group import FsdpGroup, fsdp_groups
from graphshard.fsdp2.param import FsdpParam
from graphshard.fsdp2.state import (
    State,
    forward_methods,
    mixed_precision,
    modules_of,
    remove_hooks,
    states_under,
)
from graphshard.schedule.setting import Obstacle


@dataclass(frozen=True, slots=True)
class ShardingCall:
    """One `fully_shard` call: the FQNs of its modules ("" is the model), in the model's order, and
    what it was given.

    reshard_after_forward: None if it was left to FSDP2. params: FQNs of what it sharded.
    """

    modules: tuple[str, ...]
    params: tuple[str, ...]
    mesh: DeviceMesh | None
    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool | int | None = None


@dataclass(frozen=True, slots=True)
class Sharding:
    """calls: children before parents. dims: FQN and dimension of what is not sharded on dim 0.
    whole: parameters in sharded modules that no call took (`ignored_params`). has_dtensors: there
    were DTensors before (tensor parallel)."""

    calls: tuple[ShardingCall, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    whole: tuple[str, ...] = ()
    has_dtensors: bool = False


def obstacle(model: nn.Module) -> Obstacle | None:
    """What stands in the way of `undo`."""
    for state in states_under(model):
        groups = fsdp_groups(state)
        if any(not isinstance(g.raw.mesh_info, _fsdp_common.FSDPMeshInfo) for g in groups):
            return Obstacle.REPLICATES
        if len(groups) > 1:
            return Obstacle.MESHES
        if any(_is_special(param) for group in groups for param in group.params):
            return Obstacle.SUBCLASSES
        if next(forward_methods(state), None) is not None:
            return Obstacle.METHODS
    return None


def _is_special(param: FsdpParam) -> bool:
    local = param.raw._sharded_local_tensor
    return has_extensions(param.raw) or is_traceable_wrapper_subclass(local)


def sharding_of(model: nn.Module) -> Sharding:
    """What `fully_shard` was called with."""
    names = {module: name for name, module in model.named_modules()}
    fqns = {id(p): name for name, p in model.named_parameters()}
    states = states_under(model)
    groups = [group for state in states for group in fsdp_groups(state)]
    params = [param for group in groups for param in group.params]
    sharded = {id(param.sharded) for param in params}
    inside = (p for state in states for module in modules_of(state) for p in module.parameters())
    return Sharding(
        tuple(_call(state, names, fqns) for state in reversed(states)),
        tuple((fqns[id(p.sharded)], p.shard_dim) for p in params if p.shard_dim),
        tuple(dict.fromkeys(fqns[id(p)] for p in inside if id(p) not in sharded)),
        any(group.has_dtensors for group in groups),
    )


def _call(state: State, names: dict[nn.Module, str], fqns: dict[int, str]) -> ShardingCall:
    group = next(iter(fsdp_groups(state)), None)
    return ShardingCall(
        tuple(name for module, name in names.items() if module in modules_of(state)),
        () if group is None else tuple(fqns[id(param.sharded)] for param in group.params),
        None if group is None else group.raw.mesh_info.mesh,
        mixed_precision(state),
        OffloadPolicy() if group is None else group.raw.offload_policy,
        None if group is None or group.reshard_is_automatic else _reshard(group),
    )


def _reshard(group: FsdpGroup) -> bool | int:
    smaller = group.post_forward_process_group
    return group.reshard_after_forward if smaller is None else smaller.size()


def undo(model: nn.Module) -> Sharding:
    """Take every `fully_shard` back. The model must have no `obstacle`."""
    found = sharding_of(model)
    for state in states_under(model):
        for group in fsdp_groups(state):
            for param in group.params:
                whole = _whole(param)
                for slot in param.slots:
                    slot.module._parameters[slot.name] = whole
        for module in _managed(state):
            for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                vars(module).pop(name, None)
        remove_hooks(state)
        for module in modules_of(state):
            _forget(module)
    return found


def _whole(param: FsdpParam) -> nn.Parameter:
    """On the meta device, of the size that it had."""
    tensor: torch.Tensor = torch.empty(param.size, dtype=param.sharded.dtype, device="meta")
    if (spec := param.unsharded_spec) is not None:
        tensor = DTensor(tensor, spec, requires_grad=False)
    return nn.Parameter(tensor, requires_grad=param.sharded.requires_grad)


def _managed(state: State) -> Iterator[nn.Module]:
    """The modules of the call, with all inside."""
    for module in modules_of(state):
        yield from module.modules()


def _forget(module: nn.Module) -> None:
    """The module is of its own class again, and none of `fully_shard`'s."""
    order = type(module).__mro__
    module.__class__ = order[order.index(FSDPModule) + 1]
    held = vars(module)
    held[STATE_KEY].pop(fully_shard.__wrapped__)  # type: ignore[attr-defined]
    held[REGISTRY_KEY].pop(fully_shard.__name__)
    for key in (STATE_KEY, REGISTRY_KEY):
        if not held[key]:
            del held[key]
    del _module_state_mapping[module]
