"""Blocks that were compiled in place: the root's first call compiles the whole model instead.

Many frameworks compile block by block, and never the root. Each graph then knows one group, and
nothing is planned across them. Who is the root shows when it is called. What a module runs is what
`Module.compile` left on it, else what its class has: FSDPModule has a descriptor there, in the
place of nn.Module's None, that compiles the first one to be called around blocks that wait.
It stays for good, since Dynamo guards on what a class has; reading it costs 0.2 us per call.

Assumed: FSDP2's own rule, that the first of its modules to be called is the root. What a block
was given (options, `dynamic`) counts for the whole; blocks that differ stay as they are.
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
from graphshard.options import Options

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What one `Module.compile` asked for."""

    options: Options
    dynamic: bool | None = None


# Compiled in place, and not called yet. To ask whether there are any runs no Python function, which
# Dynamo would look at for other backends.
_WAITING: dict[weakref.ref[nn.Module], Request] = {}


class FirstCall:
    """What an FSDPModule runs that was not compiled itself; read without a call it does nothing."""

    @dynamo.invisible
    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Any] | None:
        if torch.compiler.is_compiling() or module is None or not _WAITING:
            return None
        return partial(_promote, module) if _waiting_under(module) else None


def install() -> None:
    """Once per process."""
    dynamo.invisible(torch.compiler.is_compiling)
    fsdp2.ShardedModule._compiled_call_impl = FirstCall()  # type: ignore[attr-defined]


def wait_for_root(module: nn.Module, request: Request) -> None:
    """`module` was compiled in place: a root that is called before it is compiled whole."""
    if request.options.promote:
        _WAITING[weakref.ref(module, _WAITING.pop)] = request


def wait_no_longer(module: nn.Module) -> None:
    """`module` is called compiled, with all that is in it."""
    for found in _waiting_under(module):
        del _WAITING[weakref.ref(found)]


def _waiting_under(module: nn.Module) -> dict[nn.Module, Request]:
    if not _WAITING:
        return {}
    found = {inner: _WAITING.get(weakref.ref(inner)) for inner in module.modules()}
    return {inner: request for inner, request in found.items() if request is not None}


def _promote(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The first call of `root`: compile it in the place of its blocks, and call it."""
    blocks = _waiting_under(root)
    wait_no_longer(root)
    requests = list(blocks.values())
    root.__dict__.pop("_compiled_call_impl", None)  # where somebody put back what had been read
    if requests and all(request == requests[0] for request in requests):
        [request, *_] = requests
        for block in blocks:
            block._compiled_call_impl = None
        # What breaks the graph around the blocks would not have failed without this.
        options = replace(request.options, fallback="warn")
        root.compile(backend="graphshard", options=options, dynamic=request.dynamic)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info(
                "%d parts of %s were compiled one by one; the whole model is compiled instead, so "
                "that one plan has all groups. options={'promote': False} keeps them apart",
                len(blocks),
                type(root).__name__,
            )
    return root(*args, **kwargs)
