"""FSDP1's methods for a training loop, on modules that FSDP2 shards.

Plain functions of the module; `FullyShardedDataParallel` makes them its methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from graphshard.fsdp2 import fsdp_groups, state_of
from graphshard.migrate.record import record_of


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: backward inside reduces nothing.

    What a module was told before holds again after. With SHARD_GRAD_OP, parameters stay gathered
    after a backward inside, as in FSDP1.
    """
    before = []
    for module in sharded_modules(model):
        assert isinstance(module, nn.Module)
        for group in fsdp_groups(state_of(module))[:1]:  # the setters set all groups of a module
            before.append((module, group.reduces, group.all_reduces, group.reshard_after_backward))
        record = record_of(module)
        module.set_requires_gradient_sync(False, recurse=False)
        if record is not None and record.keeps:
            module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module, reduces, all_reduces, reshards in before:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(all_reduces, recurse=False)
            module.set_reshard_after_backward(reshards, recurse=False)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before, as a tensor.

    The norm is over whole gradients, not shards: `torch.nn.utils.clip_grad_norm_` on DTensors, with
    `.full_tensor()` on its result. Gradients on other meshes, or on none (ignored parameters), are
    normed apart and put together, because DTensors of one mesh only mix with their like. All ranks
    have to call it.
    """
    apart: dict[object, list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            apart.setdefault(mesh, []).append(param)
    norms = [
        _whole(get_total_norm([p.grad for p in params if p.grad is not None], float(norm_type)))
        for params in apart.values()
    ]
    total = norms[0] if len(norms) == 1 else get_total_norm(norms, float(norm_type))
    for params in apart.values():
        clip_grads_with_norm_(params, float(max_norm), total)
    return total


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
