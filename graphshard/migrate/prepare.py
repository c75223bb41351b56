"""What FSDP1 does to a module's tensors before it shards them: fill, broadcast, cast.

In comes a module whose sharded children are done; afterwards its own parameters and buffers are on
no meta device and, if asked, those of the first rank and in the buffers' dtype. Only what one
`fully_shard` call covers is whole in memory at a time, as in FSDP1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from graphshard.errors import MigrateError


def own_modules(module: nn.Module, ignored: Sequence[nn.Module]) -> list[nn.Module]:
    """`module` and what is in it, without sharded and ignored modules; parents first."""
    found, seen = [module], dict.fromkeys((module, *ignored))
    for parent in found:
        for child in parent.children():
            if not isinstance(child, FSDPModule) and child not in seen:
                seen[child] = None
                found.append(child)
    return found


def _own_tensors(
    modules: Sequence[nn.Module], ignored: Sequence[nn.Parameter] = ()
) -> list[Tensor]:
    each = (itertools.chain(m.parameters(False), m.buffers(False)) for m in modules)
    skip = {id(p) for p in ignored}
    found = {id(t): t for t in itertools.chain.from_iterable(each) if id(t) not in skip}
    return list(found.values())


@torch.no_grad()
def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
    ignored: Sequence[nn.Parameter],
) -> bool:
    """Fill the modules if one of their tensors is on the meta device; whether that was so.

    As in FSDP1, `init` is called on each module, and has to fill that module's own tensors only;
    without it, modules are emptied onto `device` and `reset_parameters` is called on those that
    have tensors. Raises MigrateError (GS1006).
    """

    def on_meta() -> list[Tensor]:
        return [t for t in _own_tensors(modules, ignored) if t.is_meta]

    if not on_meta():
        return False
    for module in modules:
        if init is not None:
            init(module)
        elif _own_tensors([module]):
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise MigrateError(
                    "GS1006",
                    f"{type(module).__name__} has tensors on the meta device and no "
                    "reset_parameters(): pass param_init_fn=",
                )
            module.to_empty(device=device, recurse=False)
            reset()
    if left := len(on_meta()):
        raise MigrateError("GS1006", f"param_init_fn= left {left} tensors on the meta device")
    return True


@torch.no_grad()
def broadcast(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    ignored: Sequence[nn.Parameter],
) -> None:
    """Give all ranks of `mesh` the tensors of its first rank: over nodes first, then inside.

    Ignored parameters are left alone: each rank may have its own.
    """
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        for tensor in _own_tensors(modules, ignored):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            sent = local.to(device).contiguous()  # NCCL sends nothing from a CPU
            dist.broadcast(sent, group=group, group_src=0)
            local.copy_(sent)


def cast_buffers(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> list[str]:
    """Cast floating buffers in place, as FSDP1 does in the first forward; names of those cast."""
    done = []
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                buffer.data = buffer.data.to(dtype)
                done.append(f"{prefix}.{name}".lstrip("."))
    return done
