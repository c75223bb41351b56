"""Which node of a graph made the memory that another one shows."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphshard.graph.collectives import WAIT
from graphshard.graph.program import is_view

# Their results are their first argument, of which their schemas say nothing.
_YIELD_FIRST = (torch.ops.aten._unsafe_view.default, WAIT)


def owner(node: fx.Node) -> fx.Node:
    """The node that made the memory which `node` shows.

    Each result of an op with several has memory of its own; it belongs to the `getitem`.
    """
    while _shares(node):
        node = node.all_input_nodes[0]
    return node


def _shares(node: fx.Node) -> bool:
    """The node's memory is that of its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return is_view(node) or _writes(node) or node.target in _YIELD_FIRST


def maker(node: fx.Node) -> fx.Node:
    """The op (or placeholder) that made the memory which `node` shows."""
    return producer(owner(node))


def producer(node: fx.Node) -> fx.Node:
    """The op of which `node` is one of several results, or `node`."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _writes(node: fx.Node) -> bool:
    """An in-place op: its result is its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and _aliases(node.target)


@cache
def _aliases(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def fills_memory(node: fx.Node) -> bool:
    """What `node` shows is all of its memory, without gaps, as far as that is known of its sizes: a
    tensor of the same sizes and strides is a copy of it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if is_traceable_wrapper_subclass(value):
        return False
    dims = list(zip(value.shape, value.stride(), strict=True))
    covered: int | torch.SymInt = 1
    while dims:
        inner = [at for at, (size, _) in enumerate(dims) if statically_known_true(size == 1)]
        inner += [at for at, dim in enumerate(dims) if statically_known_true(dim[1] == covered)]
        if not inner:
            return False
        size, _ = dims.pop(inner[0])  # by position: comparing symbols would guard on them
        covered = covered * size
    return statically_known_true(covered * value.itemsize == value.untyped_storage().nbytes())
