"""Whole parameters of a sharded module, and back: `summon_full_params` and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from graphshard.errors import MigrateError
from graphshard.migrate.prepare import own_modules
from graphshard.migrate.training import sharded_modules


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of `whole`, which every rank has: no communication.

    Raises MigrateError (GS1003) if `like` is also cut by tensor parallelism.
    """
    if any(type(p) not in (Shard, Replicate) for p in like.placements):
        raise MigrateError(
            "GS1003",
            "a parameter that tensor parallelism cuts too cannot be filled from a whole tensor "
            "here: use set_model_state_dict of torch.distributed.checkpoint.state_dict with "
            "StateDictOptions(full_state_dict=True)",
        )
    return distribute_tensor(
        whole.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Parameters are whole tensors inside, in the dtype of the shards, as with FSDP1.

    recurse: those of sharded modules inside `module` too. writeback: what was changed goes to the
    shards on exit, from each rank's own copy. rank0_only: other ranks keep their shards.
    offload_to_cpu: the whole tensors are on the CPU. with_grads: gradients as well. All ranks have
    to enter. Raises MigrateError (GS1008) for `rank0_only` with `writeback`, and when the module is
    called inside.
    """
    if rank0_only and writeback:
        raise MigrateError(
            "GS1008", "summon_full_params(rank0_only=True) cannot write back: pass writeback=False"
        )
    wrapped = sharded_modules(module)
    for one in wrapped:
        one.reshard()  # so that what is registered is the shards
    owners = list(module.modules()) if recurse else own_modules(module, ())
    swapped = list(_swap(owners, keep=not rank0_only or dist.get_rank() == 0,
                         cpu=offload_to_cpu, with_grads=with_grads))  # fmt: skip
    hooks = [_as_module(m).register_forward_pre_hook(_refuse, prepend=True) for m in wrapped]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for owner, name, shard, whole in swapped:
            setattr(owner, name, shard)
            if writeback:
                _write_back(shard, whole, with_grads)


def _as_module(module: FSDPModule) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module


def _refuse(module: nn.Module, args: Any) -> NoReturn:
    raise MigrateError(
        "GS1008",
        f"{type(module).__name__} was called inside summon_full_params: call it outside. Methods "
        "other than forward, such as generate, gather what they use after "
        'torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")',
    )


@torch.no_grad()
def _swap(
    owners: list[nn.Module], *, keep: bool, cpu: bool, with_grads: bool
) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
    """Register whole tensors in place of shards. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner in owners:
        for name, shard in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if not isinstance(shard.data, DTensor):
                continue
            if id(shard) not in made:
                made[id(shard)] = _whole(shard, cpu, with_grads)
            if keep:
                setattr(owner, name, made[id(shard)])
                yield owner, name, shard, made[id(shard)]


def _whole(shard: nn.Parameter, cpu: bool, with_grads: bool) -> nn.Parameter:
    def gathered(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        full = tensor.full_tensor()
        return full.cpu() if cpu else full.clone()  # full_tensor of one rank is the shard itself

    whole = nn.Parameter(gathered(shard.data), requires_grad=shard.requires_grad)
    if with_grads and shard.grad is not None:
        whole.grad = gathered(shard.grad)
    return whole


@torch.no_grad()
def _write_back(shard: nn.Parameter, whole: nn.Parameter, with_grads: bool) -> None:
    assert isinstance(shard, DTensor)
    shard.copy_(shard_like(whole, shard))
    if with_grads and isinstance(shard.grad, DTensor) and whole.grad is not None:
        shard.grad.copy_(shard_like(whole.grad, shard.grad))
