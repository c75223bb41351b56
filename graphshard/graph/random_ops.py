"""Ops that torch takes for random, the ones of them that are not, and torch's wrappers of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg


def is_random(node: fx.Node) -> bool:
    """Another call would yield something else. Attention is random by its tag; without dropout it
    draws nothing."""
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return bool(argument_of(node, "dropout_p", default=1.0))


def argument_of(node: fx.Node, name: str, default: Any = None) -> Any:
    """What the op that `node` calls, wrapped or not, is given for its argument `name`. default: for
    ops that have no such argument."""
    op, args = wrapped_op(node)
    for place, argument in enumerate(op._schema.arguments if isinstance(op, OpOverload) else ()):
        if argument.name == name:
            given = args[place] if place < len(args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return default


def without_tags(graph: fx.Graph) -> dict[str, OpOverload]:
    """Have `graph` call what is random by its tag only by the op's name, which has no tags.

    Otherwise the partition keeps a random state for each of them that is computed again. Returns
    what `with_tags` needs: the ops by the names of their nodes.
    """
    found = {}
    for node in graph.nodes:
        op = node.target
        if (
            isinstance(op, OpOverload)
            and torch.Tag.nondeterministic_seeded in op.tags
            and not is_random(node)
        ):
            found[node.name] = op
            node.target = op.overloadpacket
    return found


def with_tags(graph: fx.Graph, ops: Mapping[str, OpOverload]) -> None:
    """Undo `without_tags` in a part of the graph."""
    for node in graph.nodes:
        op = ops.get(node.name)
        if op is not None and node.target is op.overloadpacket:
            node.target = op


def packet_of(node: fx.Node) -> Any:
    """The op that a node calls, wrapped or not, without its overload."""
    op, _ = wrapped_op(node)
    return getattr(op, "overloadpacket", op)


def wrapped_op(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node calls and its arguments, also where it is an argument of what the node
    calls: of torch's wrappers of random ops that are computed again, of DTensor's random ops, of
    ops that write or print."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, OpOverload):
            return argument, node.args[place + 1 :]
    return node.target, node.args


def note_random_values(graph: fx.Graph) -> None:
    """Give a random op that is computed again the fake value that torch leaves out."""
    for node in graph.nodes:
        op, args = wrapped_op(node)
        if op is node.target or "val" in node.meta or any(map(_is_item, node.users)):
            continue
        kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
        args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        state = node.all_input_nodes[0].meta["val"]
        with state.fake_mode:
            node.meta["val"] = op(*args, **kwargs)


def _is_item(node: fx.Node) -> bool:
    """It carries the value of one of the results."""
    return node.target is operator.getitem
