"""Modules that run as they are, without Dynamo, because it cannot capture what hangs on them.

In: the root of a model. Out: why, for each module that has to stay out. True afterwards: a call of
such a module, and all that it calls, is eager FSDP2, also when the call around it is compiled and
when a backward calls it again. So recomputation runs the code that forward ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry as applied_to

from graphshard.fsdp2 import ShardedModule

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def modules_to_leave(root: nn.Module) -> dict[nn.Module, str]:
    """The modules in `root` that Dynamo must not look into, and why.

    They are the innermost `fully_shard`ed ones around what cannot be captured, so that no group is
    half inside a graph, and identical blocks do not share a graph that lacks the hooks of one. If
    there is none below `root`, it is what cannot be captured alone; or `root`, what it calls apart.
    """
    found: dict[nn.Module, str] = {}
    _search(root, "", None, found)
    return found


def _search(
    module: nn.Module, fqn: str, block: nn.Module | None, found: dict[nn.Module, str]
) -> None:
    reason = _reason(module, fqn or "(root)")
    if reason is not None:
        found.setdefault(block or module, reason)
    for name, child in module.named_children():
        is_block = isinstance(child, ShardedModule)
        _search(child, f"{fqn}.{name}" if fqn else name, child if is_block else block, found)


def _reason(module: nn.Module, fqn: str) -> str | None:
    hooks = [hook for kind in _BACKWARD_HOOKS for hook in getattr(module, kind).values()]
    if hooks:
        names = ", ".join(dict.fromkeys(_name(hook) for hook in hooks))
        return (
            f"module {fqn} has full-backward hooks ({names}), which cannot be captured; "
            "hooks on tensors and on parameters can"
        )
    if "checkpoint" in (applied_to(module) or {}):
        return (
            "checkpointing by hooks (torch.distributed._composable.checkpoint) cannot be captured; "
            "torch.utils.checkpoint and checkpoint_wrapper can"
        )
    return None


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def run_plainly(module: nn.Module) -> Callable[..., Any]:
    """Calls of `module` are eager from now on; copies and pickles of it do not know of this.

    Returns what they run. Where the user compiled the module itself, that stays, and it is for the
    compiled function to run this instead.
    """
    plain = torch._dynamo.disable(
        module._call_impl, recursive=True, reason="graphshard leaves it to eager FSDP2"
    )
    if module._compiled_call_impl is None:
        module._compiled_call_impl = plain
    return plain  # type: ignore[no-any-return]
