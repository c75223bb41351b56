"""FSDP2's states: finding them, initialising them, and resetting what an exception left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard.fsdp2 import versions
from graphshard.fsdp2.group import fsdp_groups

State = FSDPState
ShardedModule = FSDPModule


def states_under(root: nn.Module) -> list[FSDPState]:
    """The FSDP states in `root`'s module tree, each once, in `named_modules` order."""
    found = (state_of(m) for m in root.modules() if isinstance(m, FSDPModule))
    return list(dict.fromkeys(found))


def state_of(module: nn.Module) -> FSDPState:
    """The state that `fully_shard` attached to `module`."""
    return module._get_fsdp_state()  # type: ignore[operator, no-any-return]


def modules_of(state: FSDPState) -> tuple[nn.Module, ...]:
    """The modules that one `fully_shard` call put together."""
    return state._modules


def siblings(state: FSDPState) -> list[FSDPState]:
    """All states of the same root; `lazy_init` must have run."""
    return list(dict.fromkeys(state._state_ctx.all_states))  # 2.11 lists grouped ones twice


def is_root(state: FSDPState) -> bool:
    return bool(state._is_root)


def is_inner(state: FSDPState) -> bool:
    """Another state was found to be its root."""
    return state._is_root is False


def lazy_init(state: FSDPState) -> None:
    """FSDP2's own lazy initialisation, which finds the root, names and validates parameters.

    Raises what FSDP2 raises (a parameter shared between groups, parameters on meta, ...).
    """
    state._lazy_init()


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """The parts of a MixedPrecisionPolicy that act on activations."""

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


def cast_policy(state: FSDPState) -> CastPolicy:
    policy = state._mp_policy
    cast_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
    return CastPolicy(policy.param_dtype if cast_inputs else None, policy.output_dtype)


def mixed_precision(state: FSDPState) -> MixedPrecisionPolicy:
    return state._mp_policy


def cast_inputs(state: FSDPState, wanted: bool) -> None:
    """Change `cast_forward_inputs` of a sharded module; FSDP2 reads it in each forward."""
    state._mp_policy = replace(state._mp_policy, cast_forward_inputs=wanted)


def device_of(state: FSDPState) -> torch.device:
    return state._device


def is_mid_iteration(state: FSDPState) -> bool:
    """FSDP2's own (eager) state machine is between the start and the end of a step."""
    return (
        state._training_state is not TrainingState.IDLE
        or state._state_ctx.iter_forward_root is not None
        or state._state_ctx.post_backward_final_callback_queued
    )


def finishes_itself(state: FSDPState) -> bool:
    """FSDP2's own hooks have seen this backward: its final callback reshards when that ends."""
    return bool(state._state_ctx.post_backward_final_callback_queued)


def end_backward(state: FSDPState) -> None:
    """What FSDP2's final callback ends, after a backward that its hooks have not seen.

    An eager forward may have left a list of modules in FORWARD: one of them was not called, or
    lies in another forward root.
    """
    state._state_ctx.iter_forward_root = None
    for sibling in state._state_ctx.all_states:
        if sibling._training_state is not TrainingState.IDLE:
            sibling._modules_to_run_forward.clear()
            sibling._training_state = TrainingState.IDLE
            for group in fsdp_groups(sibling):
                group.raw._training_state = TrainingState.IDLE


def is_idle(state: FSDPState) -> bool:
    """No forward or backward of these modules runs now that FSDP2's hooks have seen."""
    return bool(state._training_state is TrainingState.IDLE)


def reset_iteration(states: Sequence[FSDPState], *, waits: bool = True) -> None:
    """Drop what an exception left in FSDP2's eager state machine; all groups are SHARDED after.

    torch 2.11 and 2.12 have no `reset_iter_state`, so its parts are done here for them. waits: for
    what FSDP2 has issued; False where other ranks will never take part in it. Raises what waiting
    raises, when everything is reset.
    """
    if waits:
        try:
            _reset_waiting(states)
            return
        except Exception:
            reset_iteration(states, waits=False)
            raise
    for state in states:
        for group in fsdp_groups(state):
            group.raw._all_gather_result = None
    _reset_waiting(states)


def _reset_waiting(states: Sequence[FSDPState]) -> None:
    for state in states:
        if versions.STATE_RESETS_ITSELF:
            if is_root(state):
                state._reset_iter_state()
            continue
        context = state._state_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        state._training_state = TrainingState.IDLE
        state._comm_ctx.all_gather_state = None
        state._comm_ctx.post_forward_order.clear()
        for group in fsdp_groups(state):
            _reset_group(group.raw)


def _reset_group(raw: Any) -> None:
    pending = raw._all_gather_result
    if pending is not None and isinstance(pending.all_gather_work, dist.Work):
        pending.all_gather_work.wait()
    raw._all_gather_result = None
    raw._partial_reduce_output = None
    raw._post_forward_indices.clear()
    raw._training_state = TrainingState.IDLE
    raw._to_sharded()


def forward_hooks(state: FSDPState) -> Iterator[tuple[Callable[..., Any], bool]]:
    """FSDP2's hook functions of a grouped state (`fully_shard([a, b])`), which are closures.

    Yields (hook, is_pre): ordinary functions with `__wrapped__`, one pair per module.
    """
    if len(state._modules) > 1:
        for module in state._modules:
            yield from _hooks_of(module)


def grouped_hook(module: nn.Module, *, is_pre: bool) -> Callable[..., Any]:
    """The one of `forward_hooks` that FSDP2 registered on `module`."""
    return next(hook for hook, pre in _hooks_of(module) if pre is is_pre)


def _hooks_of(module: nn.Module) -> Iterator[tuple[Callable[..., Any], bool]]:
    names = {"_pre_forward": True, "_post_forward": False}
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for hook in hooks:
        inner = getattr(hook, "__wrapped__", None)
        is_pre = names.get(getattr(inner, "__name__", ""))
        if is_pre is not None and not isinstance(hook, functools.partial):
            yield hook, is_pre


def forward_methods(state: FSDPState) -> Iterator[FunctionType]:
    """The functions that `register_fsdp_forward_method` put on the state's modules."""
    home = register_fsdp_forward_method.__code__.co_filename
    for module in state._modules:
        for value in vars(module).values():
            method = getattr(value, "__func__", None)
            if isinstance(method, FunctionType) and method.__name__ in vars(module):
                code = method.__code__
                if code.co_name == "wrapped_method" and code.co_filename == home:
                    yield method


def remove_hooks(state: FSDPState) -> None:
    """FSDP2's own hooks no longer run around forward: nothing is gathered, cast or given back."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
