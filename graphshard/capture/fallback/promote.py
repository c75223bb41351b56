"""What was compiled and is not what gets called: the root is compiled instead.

Many frameworks compile block by block, and never the root: each graph then knows one group, and
nothing is planned across them. Others compile a module around the root of which they call methods,
and never `__call__`: then nothing is compiled. Who is the root shows when it is called. What a
module runs is what `Module.compile` left on it, else what its class has: FSDPModule has a
descriptor there, in the place of nn.Module's None. It compiles the first module to be called that
has blocks that wait in it, or around it. It stays for good, since Dynamo guards on what a class
has; reading it takes 0.2 us.

Assumed: FSDP2's own rule, that the first of its modules to be called is the root. What was asked
for (options, `dynamic`) then counts for the whole; blocks that differ stay as they are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphshard import fsdp2
from graphshard.capture import dynamo
from graphshard.capture.fallback.causes import warn_once
from graphshard.options import Options

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for a module. in_place: by `Module.compile`; else `torch.compile` made a
    wrapper, and whoever calls the module itself wants it eager."""

    options: Options
    dynamic: bool | None
    in_place: bool


# Compiled, and not called yet. To ask whether there are any runs no Python function, which
# Dynamo would look at for other backends.
_WAITING: dict[weakref.ref[nn.Module], Request] = {}
# Called since, with nothing that waits in them or around them.
_STRANGERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Called once, while a wrapper of theirs waits.
_EAGER: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class FirstCall:
    """What an FSDPModule runs that was not compiled itself; read without a call it does nothing."""

    @dynamo.invisible
    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Any] | None:
        if torch.compiler.is_compiling() or module is None or not _WAITING:
            return None
        return partial(_promote, module) if _requests(module) else None


def install() -> None:
    """Once per process."""
    dynamo.invisible(torch.compiler.is_compiling)
    fsdp2.ShardedModule._compiled_call_impl = FirstCall()  # type: ignore[attr-defined]


def wait_for_root(module: nn.Module, request: Request) -> None:
    """`module` was compiled: a root that is called before it is compiled instead."""
    if request.options.promote:
        _WAITING[weakref.ref(module, _WAITING.pop)] = request
        _STRANGERS.clear()


def wait_no_longer(module: nn.Module) -> None:
    """`module` is called compiled, with all that is in it."""
    for inner in module.modules() if _WAITING else ():
        _WAITING.pop(weakref.ref(inner), None)


def _requests(root: nn.Module) -> dict[nn.Module, Request]:
    """What waits in `root` or around it, if it may be the root."""
    if root in _STRANGERS or fsdp2.is_inner(fsdp2.state_of(root)):
        return {}
    inside = set(root.modules())
    waiting = {module: request for ref, request in _WAITING.items() if (module := ref())}
    found = {
        module: request
        for module, request in waiting.items()
        if (module in inside and (request.in_place or module is not root))
        or (request.in_place and _has(module, root))
    }
    if root in waiting and not found:
        _note_eager_call(root)
    elif not found:
        _STRANGERS.add(root)
    return found


def _note_eager_call(root: nn.Module) -> None:
    """`root` is called, and not the wrapper that `torch.compile` made of it. Once may be meant."""
    if root not in _EAGER:
        _EAGER.add(root)
        return
    _STRANGERS.add(root)
    name = type(root).__name__
    warn_once(
        f"torch.compile wrapped {name}, and {name} itself is called: nothing is compiled. Call "
        "what torch.compile returned, or compile in place: model.compile(backend='graphshard')"
    )


def _has(module: nn.Module, inner: nn.Module) -> bool:
    return any(found is inner for found in module.modules())


def _promote(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The first call of `root`: compile it in the place of what waits, and call it."""
    requests = _requests(root)
    wait_no_longer(root)
    root.__dict__.pop("_compiled_call_impl", None)  # where somebody put back what had been read
    asked = list(requests.values())
    if any(request != asked[0] for request in asked):
        warn_once(
            f"{len(asked)} parts of {type(root).__name__} were compiled with unlike options: each "
            "has a plan of its own"
        )
    elif asked:
        for block in set(root.modules()) & requests.keys():
            block._compiled_call_impl = None
        # What breaks the graph around the blocks would not have failed without this.
        options = replace(asked[0].options, fallback="warn")
        root.compile(backend="graphshard", options=options, dynamic=asked[0].dynamic)
        _tell(root, list(requests))
    return root(*args, **kwargs)


def _tell(root: nn.Module, asked: list[nn.Module]) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    names = ", ".join(dict.fromkeys(type(module).__name__ for module in asked))
    logger.info(
        "%s is compiled as a whole, in the place of %d x %s, so that one plan has all its groups; "
        "options={'promote': False} leaves it as it was",
        type(root).__name__,
        len(asked),
        names,
    )
