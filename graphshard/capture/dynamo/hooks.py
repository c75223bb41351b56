"""What FSDP2's hooks are traced as in graphs of this backend, and in no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.guards import install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import (
    _disable_side_effect_safety_checks_for_current_subtracer as allow_side_effects,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard import fsdp2
from graphshard.capture.dynamo.forward import forward_now
from graphshard.capture.group_spec import GroupSpec
from graphshard.capture.hooks import enter_group, leave_group
from graphshard.capture.root_state import handle_of, is_entered_as, prepare

_WRAPPERS = (
    "_torchdynamo_orig_backend",
    "_torchdynamo_orig_callable",
    "_compiler_fn",
    "compiler_fn",
    "func",
)


def wrappers(callback: Any) -> Iterator[Any]:
    """Dynamo's wrappers around a backend function, from the outside, the function last."""
    for _ in range(16):
        yield callback
        inner = next((getattr(callback, n) for n in _WRAPPERS if hasattr(callback, n)), None)
        if inner is None:
            return
        callback = inner


def is_ours(callback: Any) -> bool:
    return any(getattr(w, "is_graphshard_backend", False) for w in wrappers(callback))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compiling_for_graphshard() -> bool:
    transaction = InstructionTranslator.current_tx()
    return is_ours(transaction.output.compiler_fn)


_PRE_FORWARD: Any = FSDPState._pre_forward
_POST_FORWARD: Any = FSDPState._post_forward
# What FSDP2 itself does under Dynamo: break the graph and run the hook in eager mode.
_eager_pre_forward = torch._dynamo.disable(
    _PRE_FORWARD.__wrapped__, recursive=True, reason="skipping FSDP hooks"
)
_eager_post_forward = torch._dynamo.disable(
    _POST_FORWARD.__wrapped__, recursive=True, reason="skipping FSDP hooks"
)


def _pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
    spec = module._graphshard_spec()
    if spec is None:
        return _eager_pre_forward(self, module, args, kwargs)
    begins = module._graphshard_begins()
    return allow_side_effects(enter_group, module, spec, begins, args, kwargs)


def _post_forward(self: Any, module: Any, args: Any, output: Any) -> Any:
    if not compiling_for_graphshard() or not module._graphshard_handle.entered["top"]:
        return _eager_post_forward(self, module, args, output)
    return allow_side_effects(leave_group, module, module._graphshard_ends(), output)


def _graphshard_spec(self: nn.Module) -> GroupSpec | None:
    """What entering the module's group is traced as; None leaves it to FSDP2's own hook.

    Runs at trace time, on the real module: Dynamo calls a method with the constant mark on the
    real object and takes its result as a constant. The method has to be found on the class under
    the function's own name. What the result depends on becomes one guard.
    """
    transaction = InstructionTranslator.current_tx()
    state, is_new = fsdp2.state_of(self), handle_of(self) is None
    if not is_ours(transaction.output.compiler_fn) or not prepare(state):
        return None
    if is_new:
        substitute_grouped_hooks(fsdp2.siblings(state))
    handle = handle_of(self)
    assert handle is not None
    spec = handle.spec()
    source = transaction.output.side_effects[self].source
    named = " and ".join(handle.fqns) or "without parameters"
    _guard(source, functools.partial(is_entered_as, spec), f"group {named} as it was traced")
    return spec


def _graphshard_begins(self: nn.Module) -> bool:
    """FSDP2 begins a forward of the module's state when it enters the module here."""
    state = fsdp2.state_of(self)
    return forward_now().enter(state, fsdp2.modules_of(state))


def _graphshard_ends(self: nn.Module) -> bool:
    """FSDP2 ends a forward of the module's state when the module has run here."""
    return forward_now().leave(fsdp2.state_of(self), [self])


def _graphshard_ends_all(self: nn.Module) -> bool:
    """The same after a method, with which FSDP2 does not wait for the list's other modules."""
    state = fsdp2.state_of(self)
    return forward_now().leave(state, fsdp2.modules_of(state))


def _guard(source: Any, holds: Callable[[Any], bool], text: str) -> None:
    """The graph that is being traced is valid while `holds` of the object at `source`.

    text: what TORCH_LOGS="recompiles" shows when it holds no more.
    """

    def create(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

    install_guard(source.make_guard(create))


def substitute_grouped_hooks(states: Iterable[fsdp2.State]) -> None:
    """Make the closures that `fully_shard([a, b])` registered traceable.

    By an attribute of the closure, of which Dynamo inlines the value: a substitute in Dynamo's
    tables would keep the closure, and with it the model, for the time of the process.
    """
    for state in states:
        for hook, is_pre in fsdp2.forward_hooks(state):
            hook._torchdynamo_inline = _grouped_pre if is_pre else _grouped_post  # type: ignore[attr-defined]
        for method in fsdp2.forward_methods(state):
            method._torchdynamo_inline = _registered(method)  # type: ignore[attr-defined]


def _registered(method: Callable[..., Any]) -> Callable[..., Any]:
    """What `method`, made by `register_fsdp_forward_method`, is traced as."""
    inner = method.__wrapped__  # type: ignore[attr-defined]
    eager = torch._dynamo.disable(method, recursive=True, reason="skipping FSDP hooks")

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        spec = module._graphshard_spec()
        if spec is None:
            return eager(module, *args, **kwargs)
        begins = module._graphshard_begins()
        args, kwargs = allow_side_effects(enter_group, module, spec, begins, args, kwargs)
        output = inner(*args, **kwargs)
        return allow_side_effects(leave_group, module, module._graphshard_ends_all(), output)

    return call


def _grouped_pre(module: Any, args: Any, kwargs: Any) -> Any:
    spec = module._graphshard_spec()
    if spec is None:
        return _eager_grouped_pre(module, args, kwargs)
    begins = module._graphshard_begins()
    return allow_side_effects(enter_group, module, spec, begins, args, kwargs)


def _grouped_post(module: Any, args: Any, output: Any) -> Any:
    if not compiling_for_graphshard() or not module._graphshard_handle.entered["top"]:
        return _eager_grouped_post(module, args, output)
    return allow_side_effects(leave_group, module, module._graphshard_ends(), output)


@functools.partial(torch._dynamo.disable, recursive=True, reason="skipping FSDP hooks")
def _eager_grouped_pre(module: Any, args: Any, kwargs: Any) -> Any:
    return fsdp2.grouped_hook(module, is_pre=True)(module, args, kwargs)


@functools.partial(torch._dynamo.disable, recursive=True, reason="skipping FSDP hooks")
def _eager_grouped_post(module: Any, args: Any, output: Any) -> Any:
    return fsdp2.grouped_hook(module, is_pre=False)(module, args, output)


def substitute_hooks() -> None:
    """Register the substitutes, once per process."""
    for ask in (_graphshard_spec, _graphshard_begins, _graphshard_ends, _graphshard_ends_all):
        constant = torch.compiler.assume_constant_result(ask)
        setattr(fsdp2.ShardedModule, ask.__name__, constant)
    torch.compiler.substitute_in_graph(_PRE_FORWARD, skip_signature_check=True)(_pre_forward)
    torch.compiler.substitute_in_graph(_POST_FORWARD, skip_signature_check=True)(_post_forward)
