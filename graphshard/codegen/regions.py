"""Compute between communication points as functions of their own, each distinct one once.

In: a scheduled graph of one direction and the ops at which its regions start. Out: a graph of the
same meaning in which each region is one call of what a compiler made of it. Regions that do the
same (ops, constants, layouts of inputs, wiring) share one compiled function.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from graphshard.graph.program import attribute_of, is_view, step_of

logger = logging.getLogger(__name__)

# From the list of a region's inputs, which it empties, to its outputs.
Call: TypeAlias = Callable[[list[Any]], Sequence[Any]]
_OUTSIDE = ("placeholder", "output", "get_attr", "call_method")


@dataclass(slots=True, eq=False)
class Artifacts:
    """The compiled regions of one captured graph, by structure. compile: makes what is missing.

    num_regions: in both directions, of which `by_key` has the distinct ones that ever ran.

    offset: between 0 and 1. Processes that share a cache on disk begin with different regions, so
    that each finds there what the others have made.
    """

    compile: Callable[[Sequence[fx.GraphModule]], Sequence[Call]]
    offset: float = 0.0
    by_key: dict[str, Call] = field(default_factory=dict)
    num_regions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CodeRegion:
    """`nodes` are run in order; `inputs` come from outside, `outputs` are read there.

    key: equal for regions that one compiled function can run.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: str


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """A graph and its regions by number. homes: the region of each compute node."""

    module: fx.GraphModule
    homes: dict[fx.Node, int]
    regions: dict[int, CodeRegion]


def sliced(module: fx.GraphModule, starts: Collection[int]) -> Sliced:
    """starts: places among the compute nodes at which a region starts; one also starts after every
    communication step."""
    homes = _homes(module.graph, starts)
    return Sliced(module, homes, dict(_regions(module.graph, homes)))


def compile_missing(slices: Sequence[Sliced], artifacts: Artifacts) -> None:
    """Make what the regions need. Raises what the compiler raises."""
    artifacts.num_regions = sum(len(part.regions) for part in slices)
    missing: dict[str, tuple[fx.GraphModule, CodeRegion]] = {}
    for part in slices:
        for region in part.regions.values():
            if region.key not in artifacts.by_key:
                missing.setdefault(region.key, (part.module, region))
    names = list(missing)
    first = int(artifacts.offset * len(names))
    order = [*names[first:], *names[:first]]
    logger.debug("compiling %d regions", len(order))
    made = dict(zip(order, artifacts.compile([_body(*missing[k]) for k in order]), strict=True))
    for key in names:  # numbered alike on all ranks
        made[key].__name__ = made[key].__qualname__ = f"region_{len(artifacts.by_key)}"
        artifacts.by_key[key] = made[key]


def linked(part: Sliced, artifacts: Artifacts) -> fx.GraphModule:
    """A module that calls a compiled function for each region."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    waiting = dict(part.regions)

    def copy(node: fx.Node) -> None:
        """With what it reads: a region may stand before the seeds of its random ops."""
        for source in node.all_input_nodes:
            if source not in new and _is_seed(source):
                copy(source)
        if _draws_seeds(node):
            new[node] = graph.call_function(draw_seeds, node.args)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)

    for node in part.module.graph.nodes:
        number = part.homes.get(node)
        if number is None:
            if node not in new:
                copy(node)
        elif (region := waiting.pop(number, None)) is not None:
            for source in region.inputs:
                if source not in new and _is_seed(source):
                    copy(source)
            box = graph.call_function(boxed, tuple(new[n] for n in region.inputs))
            call = graph.call_function(artifacts.by_key[region.key], (box,))
            for place, output in enumerate(region.outputs):
                new[output] = graph.call_function(operator.getitem, (call, place))
                new[output].meta = dict(output.meta)
    return fx.GraphModule(part.module, graph)


def boxed(*values: Any) -> list[Any]:
    """A region empties the list of its inputs: no reference outlives the last use of a tensor."""
    return list(values)


def draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    """As the code that Inductor makes for a whole graph draws them (`RandomSeeds` in its ir.py)."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count], dtype=torch.int64, device=device)


# -- finding them --------------------------------------------------------------------------------


def _homes(graph: fx.Graph, starts: Collection[int]) -> dict[fx.Node, int]:
    """The number of the region of each compute node. An item is where its list is made.

    The seeds of random ops are in none: the place of each among them would tell alike blocks apart.
    """
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
        if _is_seed(node):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        home[node] = home.get(source, number) if isinstance(source, fx.Node) else number
    return home


def _is_seed(node: fx.Node) -> bool:
    """Inductor draws seeds for all random ops of a graph at once, and looks each one up."""
    return _draws_seeds(node) or _is_prim(node, "inductor_lookup_seed")


def _draws_seeds(node: fx.Node) -> bool:
    return _is_prim(node, "inductor_seeds")


def _is_prim(node: fx.Node, name: str) -> bool:
    """Inductor's are registered when it is imported."""
    prims = torch.ops.prims
    return hasattr(prims, name) and node.target is getattr(prims, name).default


def _regions(graph: fx.Graph, homes: dict[fx.Node, int]) -> Iterator[tuple[int, CodeRegion]]:
    members: dict[int, list[fx.Node]] = {}
    for node, number in homes.items():
        members.setdefault(number, []).append(node)
    symbols = _symbols_from_data(graph)
    needs = {n: _needed(own, homes, n, symbols) for n, own in members.items()}
    read = {n for _, inputs in needs.values() for n in inputs}
    read |= {n for node in graph.nodes if node not in homes for n in node.all_input_nodes}
    for number, (nodes, inputs) in needs.items():
        outputs = tuple(n for n in members[number] if n in read)
        if outputs or any(map(_writes, nodes)):
            yield number, CodeRegion(nodes, inputs, outputs, _key(nodes, inputs, outputs))


def _symbols_from_data(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Each symbol without a hint, and the first node that is it."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and {value.node.expr} == free_unbacked_symbols(value):
            found.setdefault(value.node.expr, node)
    return found


def _needed(
    own: Sequence[fx.Node],
    homes: dict[fx.Node, int],
    number: int,
    symbols: Mapping[Any, fx.Node],
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What region `number` runs, in order, and its inputs.

    A view or a size of what another region made is made again here: that costs nothing, and alike
    regions stay alike. symbols: `_symbols_from_data`'s. Of a sum of them, as the length of a
    tensor, no code finds out the single ones: they are inputs, too.
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
    inputs |= dict.fromkeys(n for n in _unread(inputs, symbols) if n not in nodes)
    return tuple(nodes), tuple(inputs)


def _unread(inputs: Iterable[fx.Node], symbols: Mapping[Any, fx.Node]) -> Iterator[fx.Node]:
    """Nodes that are the single symbols of which the lengths of `inputs` are made."""
    lengths = [n for node in inputs for n in _lengths(node.meta.get("val"))]
    known = {n.node.expr for n in lengths}
    for length in lengths:
        for symbol in sorted(free_unbacked_symbols(length) - known, key=str):
            if symbol in symbols:
                yield symbols[symbol]


def _lengths(value: Any) -> list[torch.SymInt]:
    """What code that gets `value` can read off it."""
    read = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [n for n in read if isinstance(n, torch.SymInt)]


def _is_free(node: fx.Node) -> bool:
    """A view, or arithmetic on sizes: no memory is touched. A number that is read out of a tensor
    is none: a device would be waited for again."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return node.target is not torch.ops.aten._local_scalar_dense.default
    return is_view(node) and isinstance(value, torch.Tensor)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _is_subgraph(node: fx.Node) -> bool:
    """The body of a higher-order op."""
    return node.op == "get_attr" and isinstance(attribute_of(node), fx.GraphModule)


# -- telling them apart --------------------------------------------------------------------------


def _key(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> str:
    names = {node: f"%in_{place}" for place, node in enumerate(inputs)}
    rows = [_layout(node.meta.get("val")) for node in inputs]
    for place, node in enumerate(nodes):
        names[node] = f"%op_{place}"
        rows.append(_what(node, names))
    rows.append(str([names[node] for node in outputs]))
    return "\n".join(rows)


def _what(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        return f"subgraph {id(attribute_of(node))}"
    return f"{node.target}{map_arg((node.args, node.kwargs), names.__getitem__)}"


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"


# -- making them ---------------------------------------------------------------------------------


def _body(module: fx.GraphModule, region: CodeRegion) -> fx.GraphModule:
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
    # The neighbours of a region were traced with these strides.
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    return fx.GraphModule(module, graph)


def _lasting(node: fx.Node) -> dict[str, Any]:
    """What a compiler needs to know of a node; where it came from would tell alike ones apart."""
    return {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
