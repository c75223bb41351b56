"""Compute between communication points as functions of their own, each distinct one once.

In: a scheduled graph of one direction and the ops at which its regions start. Out: a graph of the
same meaning in which each region is one call of a callable that a compiler made, from a list of
inputs to a sequence of outputs. Regions that do the same (ops, constants, sizes, aliases among the
inputs) share one callable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from graphshard.ir import copy_of, is_view, step_of

# From the list of a region's inputs, which it empties, to its outputs.
Call: TypeAlias = Callable[[list[Any]], Sequence[Any]]
_OUTSIDE = ("placeholder", "output", "get_attr", "call_method")


@dataclass(slots=True, eq=False)
class Artifacts:
    """The compiled regions of one captured graph, by structure. compile: makes what is missing."""

    compile: Callable[[fx.GraphModule], Call]
    by_key: dict[str, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """`nodes` are run in order; `inputs` come from outside, `outputs` are read there."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def with_regions(
    module: fx.GraphModule, starts: Collection[int], artifacts: Artifacts
) -> fx.GraphModule:
    """A module that calls a compiled function for each region of `module`, which stays as it is.

    starts: places among the compute nodes at which a region starts; one also starts after every
    communication step.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    homes = _homes(module.graph, starts)
    regions = dict(_regions(module.graph, homes))
    for node in module.graph.nodes:
        number = homes.get(node)
        if number is None:
            new[node] = graph.node_copy(node, new.__getitem__)
        elif (region := regions.pop(number, None)) is not None:
            called = _artifact(module, region, artifacts)
            box = graph.call_function(boxed, tuple(new[n] for n in region.inputs))
            call = graph.call_function(called, (box,))
            for place, output in enumerate(region.outputs):
                new[output] = graph.call_function(operator.getitem, (call, place))
                new[output].meta = dict(output.meta)
    return fx.GraphModule(module, graph)


def boxed(*values: Any) -> list[Any]:
    """A region empties the list of its inputs: no reference outlives the last use of a tensor."""
    return list(values)


# -- finding them --------------------------------------------------------------------------


def _homes(graph: fx.Graph, starts: Collection[int]) -> dict[fx.Node, int]:
    """The number of the region of each compute node. An item is where its list is made."""
    home: dict[fx.Node, int] = {}
    number = count = 0
    interrupted = False
    for node in graph.nodes:
        if node.op in _OUTSIDE or step_of(node) is not None:
            interrupted = interrupted or node.op == "call_method"
            continue
        if interrupted or count in starts:
            number, interrupted = number + 1, False
        count += 1
        source = node.args[0] if node.target is operator.getitem else None
        home[node] = home.get(source, number) if isinstance(source, fx.Node) else number
    return home


def _regions(graph: fx.Graph, homes: dict[fx.Node, int]) -> Iterator[tuple[int, Region]]:
    members: dict[int, list[fx.Node]] = {}
    for node, number in homes.items():
        members.setdefault(number, []).append(node)
    needs = {number: _needed(own, homes, number) for number, own in members.items()}
    read = {n for _, inputs in needs.values() for n in inputs}
    read |= {n for node in graph.nodes if node not in homes for n in node.all_input_nodes}
    for number, (nodes, inputs) in needs.items():
        outputs = tuple(n for n in members[number] if n in read)
        if outputs or any(map(_writes, nodes)):
            yield number, Region(nodes, inputs, outputs)


def _needed(
    own: Sequence[fx.Node], homes: dict[fx.Node, int], number: int
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What region `number` runs, in order, and its inputs.

    A view or a size of what another region made is made again here: that costs nothing, and alike
    regions stay alike.
    """
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in nodes or node in inputs:
            return
        if homes.get(node) == number or _is_subgraph(node) or (node in homes and _is_free(node)):
            for source in node.all_input_nodes:
                need(source)
            nodes[node] = None
        else:
            inputs[node] = None

    for node in own:
        need(node)
    return tuple(nodes), tuple(inputs)


def _is_free(node: fx.Node) -> bool:
    """A view, or arithmetic on sizes: no memory is touched."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return is_view(node) and isinstance(value, torch.Tensor)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _is_subgraph(node: fx.Node) -> bool:
    """The body of a higher-order op."""
    return node.op == "get_attr" and isinstance(_attribute(node), fx.GraphModule)


def _attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


# -- making them ---------------------------------------------------------------------------


def _artifact(module: fx.GraphModule, region: Region, artifacts: Artifacts) -> Call:
    """What runs `region`; made if no alike region was made before."""
    body = _body(module, region)
    key = _key(body)
    if key not in artifacts.by_key:
        call = artifacts.compile(body)
        call.__name__ = call.__qualname__ = f"region_{len(artifacts.by_key)}"
        artifacts.by_key[key] = call
    return artifacts.by_key[key]


def _body(module: fx.GraphModule, region: Region) -> fx.GraphModule:
    """The region as a graph of its own. Names are numbers, so alike regions have equal graphs."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(region.inputs):
        new[node] = graph.placeholder(f"in_{place}")
        new[node].meta = _lasting(node)
    for place, node in enumerate(region.nodes):
        new[node] = copy = graph.node_copy(node, new.__getitem__)
        copy.meta = _lasting(node)
        if copy.op != "get_attr":
            copy._rename(f"op_{place}")
    output = graph.output(tuple(new[n] for n in region.outputs))
    # A region's neighbours were traced with these strides.
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    return fx.GraphModule(module, graph)


def _lasting(node: fx.Node) -> dict[str, Any]:
    """What a compiler needs to know of a node; where it came from would tell alike ones apart."""
    return {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}


def _key(body: fx.GraphModule) -> str:
    """Equal for regions that one compiled function can run."""
    return "\n".join(map(_row, body.graph.nodes))


def _row(node: fx.Node) -> str:
    value = node.meta.get("val")
    if node.op == "placeholder":
        return f"{node.name}: {_layout(value)}"
    if node.op == "get_attr":
        return f"{node.name} = {id(_attribute(node))}"
    return f"{node.name} = {node.target}{node.args}{node.kwargs}"


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
