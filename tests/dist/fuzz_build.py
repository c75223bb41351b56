"""From a case of the fuzzer to its model: sharded, and compiled as the case says."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from contract_models import mesh_of
from fuzz_cases import FuzzCase, Group
from fuzz_compare import fsdp_modules
from fuzz_models import Net
from pool import Ctx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

HALF, FULL = torch.bfloat16, torch.float32
POLICIES = {
    "": {},
    "bf16": {"param_dtype": HALF},
    "bf16-reduce-fp32": {"param_dtype": HALF, "reduce_dtype": FULL},
    "reduce-bf16": {"reduce_dtype": HALF},
    "bf16-out-fp32": {"param_dtype": HALF, "output_dtype": FULL},
    "bf16-as-given": {"param_dtype": HALF, "cast_forward_inputs": False},
}


def sharded(case: FuzzCase, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Net(case.tree).to(ctx.device)
    for path in case.frozen:
        model.get_submodule(path).requires_grad_(False)
    ignored = {p for path in case.ignored for p in model.get_submodule(path).parameters()}
    mesh = _mesh(case.mesh, ctx)
    for group in case.groups:
        modules = [model.get_submodule(path) for path in group.modules]
        kwargs = _arguments(group, ctx) | ({"ignored_params": ignored} if ignored else {})
        if case.meshes:
            params = [p for m in modules for p in m.parameters() if not isinstance(p, DTensor)]
            kwargs["shard_placement_fn"] = _by_turns(
                params, kwargs["shard_placement_fn"], [_mesh(name, ctx) for name in case.meshes]
            )
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **kwargs)
    if case.divide is not None:
        for module in fsdp_modules(model).values():
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(case.divide)
    for numbers, name in (
        (case.forward_prefetch, "set_modules_to_forward_prefetch"),
        (case.backward_prefetch, "set_modules_to_backward_prefetch"),
    ):
        for number, targets in numbers:
            getattr(module_of(case, model, number), name)(
                [module_of(case, model, t) for t in targets]
            )
    return model


def _arguments(group: Group, ctx: Ctx) -> dict[str, Any]:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim >= 2 and param.shape[1] % ctx.world_size == 0 else None

    return {
        "reshard_after_forward": group.reshard,
        "mp_policy": MixedPrecisionPolicy(**POLICIES[group.precision]),
        "shard_placement_fn": placement if group.columns else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if group.offload else OffloadPolicy(),
    }


def _by_turns(
    params: Sequence[nn.Parameter], placement: Any, meshes: Sequence[DeviceMesh]
) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    infos = [FSDPMeshInfo(m, 0) if m.ndim == 1 else HSDPMeshInfo(m, 1, 0) for m in meshes]
    turns = dict(zip(params, cycle(infos), strict=False))

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(placement and placement(param), turns[param])

    return place


def _mesh(name: str, ctx: Ctx) -> DeviceMesh:
    if name == "flat":
        return ctx.mesh
    shape = tuple(int(size) for size in name.split("x"))
    return mesh_of(ctx, shape, "replicate", "shard")


def module_of(case: FuzzCase, model: nn.Module, number: int) -> Any:
    """The sharded module of the case's group `number`; of a list the first."""
    return model.get_submodule(case.groups[number].modules[0])


def compiled(case: FuzzCase, model: nn.Module) -> Callable[..., Any]:
    how: dict[str, Any] = {"backend": "graphshard", "options": dict(case.options)}
    if case.compile == "wrap":
        return torch.compile(model, **how)
    if case.compile == "step":
        return torch.compile(lambda *args, **kwargs: model(*args, **kwargs), **how)
    names = [name for group in case.groups for name in group.modules]
    inner = [name for name in names if name] or [""]
    if case.compile == "apart":
        how["options"]["promote"] = False
    for name in {"own": [""], "each": names}.get(case.compile, inner):
        model.get_submodule(name).compile(**how)
    return model
