"""A rank with GRAPHSHARD_DISABLE: it runs eager FSDP2, once the other ranks have heard of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graphshard import fsdp2
from graphshard.options import DISABLE
from graphshard.runtime.aside import stand_aside
from graphshard.runtime.roll import members_of, open_ballots

UNPLUGGED_S = 10.0  # that a rank with GRAPHSHARD_DISABLE waits once, to hear what others do
_UNPLUGGED = "_graphshard_unplugged"


def unplugged(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What users call where GRAPHSHARD_DISABLE is set: `fn`, once other ranks have heard of it.

    Only the first call looks for the FSDP roots that it uses. A module is returned as it is.
    """
    if isinstance(fn, nn.Module):
        _listen_once(fn)
        return fn
    calls = itertools.count()

    # torch marks what torch.compile returns, which it cannot do to a bound method.
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            return fn(*args, **kwargs)
        handle = register_module_forward_pre_hook(_first_call)
        try:
            return fn(*args, **kwargs)
        finally:
            handle.remove()

    return call


def _listen_once(module: nn.Module) -> None:
    """`_first_call` for what the next call of `module` uses."""
    handles: list[Any] = []

    def begin(called: nn.Module, args: Any) -> None:
        handles.append(register_module_forward_pre_hook(_first_call))
        _first_call(called, args)

    def end(*_: Any) -> None:
        for handle in handles:
            handle.remove()

    handles.append(module.register_forward_pre_hook(begin, prepend=True))
    handles.append(module.register_forward_hook(end, always_call=True))


def _first_call(module: nn.Module, args: Any) -> None:
    """Say for a root that this rank runs it without graphshard."""
    if not isinstance(module, fsdp2.ShardedModule):
        return
    state = fsdp2.state_of(module)
    fsdp2.lazy_init(state)  # as FSDP2's own hook would now, which names the groups
    first = fsdp2.modules_of(fsdp2.siblings(state)[0])[0]
    if first.__dict__.setdefault(_UNPLUGGED, state) is not state:
        return
    groups = [g for own in fsdp2.siblings(state) for g in fsdp2.fsdp_groups(own)[:1]]
    ballots = open_ballots(members_of(groups))
    stand_aside(ballots, {DISABLE: True}, wait_s=UNPLUGGED_S)
