"""What a trace of ops depends on, as text: equal text, equal trace.

Two ranges share a trace if the ops, what they are given, and the modes around them read alike
here. What has no text that tells all of it (a function, a tensor that is a constant, an object of
the user's) is only like itself. What is assumed: such an object means the same each time it is
used in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp import autocast_mode

from graphshard.graph.program import attribute_of

_TOLD_BY_REPR = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat),
)
# Calls of these change nothing around them, though they give no tensor.
_PURE = ("_backend_from_string",)


def layout(value: Any) -> str:
    """What of a value a trace depends on."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout == torch.strided else value.layout
    bits = value.is_conj(), value.is_neg()
    return (
        f"{type(value).__name__} {value.dtype} {value.device} {tuple(value.shape)} {strides} "
        f"{value.requires_grad} {bits}"
    )


def told(node: fx.Node, show: Callable[[fx.Node], str]) -> str:
    """What a node does; `show` says what its inputs are."""
    if node.op == "get_attr":
        return f"get {_said(attribute_of(node), show)}"
    target = node.target if isinstance(node.target, str) else id(node.target)
    return f"{node.op} {target} {_said(node.args, show)} {_said(node.kwargs, show)}"


def _said(value: Any, show: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return f"%{show(value)}"
    if isinstance(value, fx.GraphModule):
        return _body(value)
    if isinstance(value, _TOLD_BY_REPR):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        rows = (f"{_said(k, show)}: {_said(v, show)}" for k, v in value.items())
        return f"{type(value).__name__} {{{', '.join(rows)}}}"
    if isinstance(value, tuple | list):  # torch.Size and named tuples as well
        return f"{type(value).__name__} ({', '.join(_said(v, show) for v in value)})"
    if isinstance(value, slice):
        return f"slice {_said((value.start, value.stop, value.step), show)}"
    if isinstance(value, partial):
        return f"partial {_said((value.func, value.args, value.keywords), show)}"
    return f"{type(value).__name__} at {id(value)}"


def _body(module: fx.GraphModule) -> str:
    """The body of a higher-order op, and what the op is told with it (a checkpoint's policy)."""
    names: dict[fx.Node, str] = {}
    rows = [_said(module.meta, names.__getitem__)]
    for index, node in enumerate(module.graph.nodes):
        is_input = node.op == "placeholder"
        rows.append(layout(example(node)) if is_input else told(node, names.__getitem__))
        names[node] = f"op_{index}"
    return "\n".join(rows)


def example(node: fx.Node) -> Any:
    """The value that Dynamo knows of a node's result."""
    return node.meta.get("example_value")


def modes(nodes: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """The modes in which each node runs, and those after the last one: what was set inside the
    graph and not set back. Empty: as around the graph.

    Dynamo writes entering and leaving as ops without a value. Those that are not known here are
    never taken for set back.
    """
    grad = torch.is_grad_enabled()
    is_on = grad
    entered: dict[fx.Node, str] = {}
    found = []
    for node in nodes:
        found.append(_modes(is_on, grad, entered))
        if node.op != "call_function" or "example_value" in node.meta:
            continue
        if node.target is torch._C._set_grad_enabled:
            is_on = bool(node.args[0])
        elif node.target is autocast_mode._exit_autocast:
            entered.pop(node.args[0], None)  # type: ignore[arg-type]
        elif getattr(node.target, "__name__", "") not in _PURE:
            entered[node] = told(node, str)
    return [*found, _modes(is_on, grad, entered)]


def _modes(is_on: bool, grad: bool, entered: Mapping[fx.Node, str]) -> tuple[str, ...]:
    changed = () if is_on is grad else (f"grad {is_on}",)
    return (*changed, *entered.values())
