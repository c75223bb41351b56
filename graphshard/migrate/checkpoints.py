"""FSDP1's state dicts, on modules that FSDP2 shards.

FSDP2's `state_dict` holds DTensors, this rank's shards. FSDP1's holds whole tensors unless
`state_dict_type` says otherwise, and old code saves them on one rank; so a migrated module does the
same, and loads both. All names are those of the model before it was sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.api import StateDictSettings
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from graphshard.errors import MigrateError
from graphshard.migrate.record import Migrated, StateDicts, record_of, recorded, remember
from graphshard.migrate.training import sharded_modules
from graphshard.migrate.whole import shard_like


def add_hooks(module: nn.Module) -> None:
    """From now on `state_dict` follows the module's record, and whole tensors can be loaded."""
    module.register_state_dict_post_hook(_after_state_dict)
    module.register_load_state_dict_pre_hook(_before_load)


@torch.no_grad()
def _after_state_dict(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    wanted = _record(module).state_dicts
    full = wanted.kind is StateDictType.FULL_STATE_DICT
    drop = full and getattr(wanted.model, "rank0_only", False) and dist.get_rank() != 0
    for key in [k for k in state if k.startswith(prefix)]:
        value = state[key]
        if full and isinstance(value, DTensor):
            value = value.full_tensor()
        if wanted.model.offload_to_cpu and isinstance(value, Tensor):
            value = value.cpu()
        if drop:
            del state[key]  # after it was gathered: that takes all ranks
        else:
            state[key] = value


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for one in sharded_modules(module):
        one.reshard()  # so that what is registered is the shards
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if isinstance(param, DTensor) and value.shape == param.shape:
            state[prefix + name] = shard_like(value, param)


def _record(module: nn.Module) -> Migrated:
    record = record_of(module)
    assert record is not None
    return record


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """What `state_dict` and `optim_state_dict` give from now on; returns what they gave before.

    FULL_STATE_DICT: whole tensors. SHARDED_STATE_DICT: DTensors, as FSDP2 itself. Raises
    MigrateError: GS1003 for LOCAL_STATE_DICT, GS1002 for a config of another type.
    """
    if state_dict_type not in _CONFIGS:
        raise MigrateError(
            "GS1003",
            f"{state_dict_type} has no equivalent: FSDP2 has no flat parameters. Use "
            "SHARDED_STATE_DICT, or torch.distributed.checkpoint",
        )
    kinds = _CONFIGS[state_dict_type]
    configs = (state_dict_config, optim_state_dict_config)
    for config, kind in zip(configs, kinds, strict=True):
        if config is not None and type(config) is not kind:
            raise MigrateError("GS1002", f"{state_dict_type} takes {kind.__name__}, got {config!r}")
    wanted = StateDicts(
        state_dict_type, state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]()
    )
    before = get_state_dict_type(module)
    for one, record in recorded(module):
        remember(one, replace(record, state_dicts=wanted))
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Raises MigrateError (GS1002) if nothing in `module` was migrated."""
    found = recorded(module)
    if not found:
        raise MigrateError(
            "GS1002",
            f"nothing in {type(module).__name__} was given to FullyShardedDataParallel of "
            "graphshard.migrate",
        )
    return found[0][1].state_dicts.settings


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """`set_state_dict_type` inside the block only."""
    before = [(one, record.state_dicts) for one, record in recorded(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for one, wanted in before:
            remember(one, replace(_record(one), state_dicts=wanted))


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The optimizer's state by parameter name, whole or sharded as `state_dict_type` says.

    `get_optimizer_state_dict` of torch.distributed.checkpoint. On CPU by default, as in FSDP1.
    Raises MigrateError (GS1003) for a state dict or a process group of the caller's own.
    """
    _no_extras("optim_state_dict", optim_state_dict=optim_state_dict, group=group)
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    only_first = full and bool(getattr(config, "rank0_only", False))
    found = get_optimizer_state_dict(
        model,
        optim,
        # Together they leave the state on rank 0 only.
        options=StateDictOptions(
            full_state_dict=full, cpu_offload=only_first and config.offload_to_cpu
        ),
    )
    if only_first and dist.get_rank() != 0:
        return {}
    if config.offload_to_cpu:
        # Copies, or what is on the CPU already, such as step counts, would go on counting.
        found = tree_map_only(Tensor, lambda tensor: tensor.to("cpu", copy=True), found)
    return dict(found)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what `optim_state_dict` gave, and return what `optim.load_state_dict` takes.

    `set_optimizer_state_dict` of torch.distributed.checkpoint, which loads at once; so the second
    load of the usual pair changes nothing. With `rank0_only`, rank 0's state goes to all ranks.
    """
    _no_extras("optim_state_dict_to_load", group=group)
    settings = get_state_dict_type(model)
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    from_first = full and bool(getattr(settings.optim_state_dict_config, "rank0_only", False))
    set_optimizer_state_dict(
        model,
        optim,
        optim_state_dict,
        options=StateDictOptions(full_state_dict=full, broadcast_from_rank0=from_first),
    )
    return optim.state_dict()


def _no_extras(name: str, **given: object) -> None:
    for argument, value in given.items():
        if value is not None:
            raise MigrateError(
                "GS1003",
                f"{name}({argument}=) has no equivalent: use get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict",
            )
