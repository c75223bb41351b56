"""`FullyShardedDataParallel` with FSDP1's arguments, done by FSDP2's `fully_shard`.

The module is sharded in place and returned; it has FSDP1's methods, and rank 0 logs the lines of
`fully_shard` code that the call stands for. What has no equivalent is an error.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    ShardingStrategy,
)

from graphshard.errors import MigrateError
from graphshard.migrate import checkpoints, training, whole
from graphshard.migrate.apply import shard
from graphshard.migrate.arguments import Arguments
from graphshard.migrate.policies import Ignored
from graphshard.migrate.record import record_of


def _gone(name: str, instead: str) -> Callable[..., NoReturn]:
    def raises(*args: object, **kwargs: object) -> NoReturn:
        raise MigrateError("GS1003", f"{name} has no equivalent in FSDP2: use {instead}")

    return raises


_OPTIMIZER = "optim_state_dict and optim_state_dict_to_load"


class FullyShardedDataParallel(metaclass=ABCMeta):  # noqa: B024 (ABCMeta for `register`)
    """FSDP1's name: shards `module` with FSDP2, in place, and returns `module` itself.

    A class only so that old code finds what it looks for: `FSDP.state_dict_type(model, ...)` and
    `isinstance(model, FSDP)`, which is true of every module that `fully_shard` has sharded. There
    are no instances.

    Arguments are those of torch.distributed.fsdp.FullyShardedDataParallel; docs/migrate.md has
    what each becomes. All ranks have to call it together. Raises MigrateError (GS1002 to GS1007).
    """

    def __new__(  # type: ignore[misc]  # returns the module, as the docstring says
        cls,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool | None = None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        arguments = Arguments(
            process_group, sharding_strategy, cpu_offload, backward_prefetch, mixed_precision,
            param_init_fn, device_id, sync_module_states, forward_prefetch, limit_all_gathers,
            use_orig_params, device_mesh,
        )  # fmt: skip
        ignored = _ignored(ignored_modules, ignored_states)
        shard(module, arguments, auto_wrap_policy, ignored)
        _equip(module)
        return module

    summon_full_params = staticmethod(whole.summon_full_params)
    state_dict_type = staticmethod(checkpoints.state_dict_type)
    set_state_dict_type = staticmethod(checkpoints.set_state_dict_type)
    get_state_dict_type = staticmethod(checkpoints.get_state_dict_type)
    optim_state_dict = staticmethod(checkpoints.optim_state_dict)
    optim_state_dict_to_load = staticmethod(checkpoints.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(_gone("full_optim_state_dict", _OPTIMIZER))
    sharded_optim_state_dict = staticmethod(_gone("sharded_optim_state_dict", _OPTIMIZER))
    shard_full_optim_state_dict = staticmethod(_gone("shard_full_optim_state_dict", _OPTIMIZER))
    scatter_full_optim_state_dict = staticmethod(_gone("scatter_full_optim_state_dict", _OPTIMIZER))
    flatten_sharded_optim_state_dict = staticmethod(
        _gone("flatten_sharded_optim_state_dict", _OPTIMIZER)
    )
    rekey_optim_state_dict = staticmethod(
        _gone("rekey_optim_state_dict", "parameter names, which optim_state_dict has")
    )

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDPModule]:
        """The sharded modules in `module`, parents first; root_only: those inside no other."""
        found = training.sharded_modules(module)
        if not root_only:
            return found
        inside = {id(m) for one in found for m in list(_modules(one))[1:]}
        return [one for one in found if id(one) not in inside]


FullyShardedDataParallel.register(FSDPModule)


def _modules(one: FSDPModule) -> Iterable[nn.Module]:
    assert isinstance(one, nn.Module)
    return one.modules()


# What every module that was given to FullyShardedDataParallel can do.
_METHODS: dict[str, Callable[..., Any]] = {
    "no_sync": training.no_sync,
    "clip_grad_norm_": training.clip_grad_norm_,
    "register_comm_hook": _gone(
        "register_comm_hook",
        "set_all_reduce_hook or set_custom_reduce_scatter of each sharded module",
    ),
}
_STATIC = (
    "summon_full_params",
    "state_dict_type",
    "set_state_dict_type",
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "fsdp_modules",
)


def code_of(model: nn.Module) -> str:
    """The lines that `FullyShardedDataParallel(model, ...)` stood for: Python, for `model`.

    Raises MigrateError (GS1002) if `model` was not given to it.
    """
    record = record_of(model)
    if record is None or record.code is None:
        raise MigrateError(
            "GS1002", f"{type(model).__name__} was not given to FullyShardedDataParallel"
        )
    return record.code


def _ignored(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> Ignored:
    if modules is not None and states is not None:
        raise MigrateError("GS1002", "ignored_modules= and ignored_states= were both given")
    given = list((modules if states is None else states) or ())
    kind = nn.Parameter if states is not None and _first_is_parameter(given) else nn.Module
    wrong = next((item for item in given if not isinstance(item, kind)), None)
    if wrong is not None:
        raise MigrateError(
            "GS1002", f"ignored modules or parameters are all of one kind, got {type(wrong)}"
        )
    if kind is nn.Parameter:
        return Ignored(params=tuple(given))
    inside = tuple(dict.fromkeys(m for module in given for m in module.modules()))
    return Ignored(inside, tuple(dict.fromkeys(p for m in inside for p in m.parameters())))


def _first_is_parameter(given: Sequence[Any]) -> bool:
    return bool(given) and isinstance(given[0], nn.Parameter)


def _equip(module: nn.Module) -> None:
    """Methods on the module itself: its class is FSDP2's, and shared with others."""
    for name, function in _METHODS.items():
        setattr(module, name, MethodType(function, module))
    for name in _STATIC:
        setattr(module, name, getattr(FullyShardedDataParallel, name))
    if not hasattr(module, "module"):
        # FSDP1's wrapper had the model as `.module`. Not a submodule: names stay what they are.
        object.__setattr__(module, "module", module)
    checkpoints.add_hooks(module)
