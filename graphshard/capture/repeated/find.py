"""Finds alike ranges that follow one another in a graph that Dynamo captured.

Two ranges are alike if they do the same ops with the same constants on inputs of the same
layout, wired in the same way. A deep model is mostly one block over and over. Blocks that each find
a size in data are not alike: it is another symbol in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphshard.capture.repeated.content import example, layout, modes, told
from graphshard.graph.program import attribute_of, is_unshard

# What these make of a view depends on where in its storage it begins, which no layout says.
_ON_STORAGE = ("as_strided", "storage_offset", "untyped_storage", torch.as_strided)
# Fewer are traced as quickly one by one.
FEWEST = 3


@dataclass(frozen=True, slots=True, eq=False)
class BlockRange:
    """`nodes` in order, what they read from outside and what is read of them outside.

    modes: before the first node and after the last (`graphshard.capture.repeated.content.modes`).
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    modes: tuple[tuple[str, ...], tuple[str, ...]]


def alike_ranges(graph: fx.Graph) -> Iterator[tuple[BlockRange, ...]]:
    """Runs of alike ranges, the longest first; no node is in two of them."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    codes = _codes(nodes)
    crossing = _crossing(nodes)
    around = modes(nodes)
    taken: set[int] = set()
    for start, stop, period in sorted(_runs(nodes, codes), key=lambda r: (r[0] - r[1], r[2])):
        if not taken.isdisjoint(range(start, stop)):
            continue
        # Where no mode is on and the fewest values cross, one block hands over to the next.
        phases = range(start, min(start + period, stop - FEWEST * period + 1))
        begin = min(phases, key=lambda i: (len(around[i + period]), crossing[i + period], i))
        starts = range(begin, stop - period + 1, period)
        ends = ((around[i], around[i + period]) for i in starts)
        parts = zip((nodes[i : i + period] for i in starts), ends, strict=True)
        alike = _longest_alike([_block_range_of(part, its_modes) for part, its_modes in parts])
        if len(alike) >= FEWEST:
            taken.update(range(start, stop))
            yield alike


def _runs(nodes: Sequence[fx.Node], codes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, period) of the places where the codes repeat at least FEWEST times."""
    places: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        if is_unshard(node) or node.op == "get_attr":
            places.setdefault(codes[place], []).append(place)
    gaps = Counter(b - a for found in places.values() for a, b in pairwise(found))
    for period in sorted(gap for gap, count in gaps.items() if count >= FEWEST - 1):
        same = [codes[place] == codes[place + period] for place in range(len(nodes) - period)]
        place = 0
        for is_same, run in groupby(same):
            length = len(list(run))
            if is_same and length >= (FEWEST - 1) * period:
                yield place, place + length + period, period
            place += length


def _codes(nodes: Sequence[fx.Node]) -> list[int]:
    """Equal for nodes that do the same on inputs of the same layout."""
    known: dict[str, int] = {}
    texts = (told(node, lambda source: layout(example(source))) for node in nodes)
    return [known.setdefault(text, len(known)) for text in texts]


def _crossing(nodes: Sequence[fx.Node]) -> list[int]:
    """How many values cross each place, from the nodes before it to later ones."""
    place = {node: index for index, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 2)
    for node, born in place.items():
        last = max((place.get(user, len(nodes)) for user in node.users), default=born)
        changes[born + 1] += 1
        changes[last + 1] -= 1
    return list(accumulate(changes))


def _block_range_of(
    part: Sequence[fx.Node], its_modes: tuple[tuple[str, ...], tuple[str, ...]]
) -> BlockRange:
    own = dict.fromkeys(part)
    inputs = dict.fromkeys(n for node in part for n in node.all_input_nodes if n not in own)
    outputs = (n for n in part if any(user not in own for user in n.users))
    return BlockRange(tuple(part), tuple(inputs), tuple(outputs), its_modes)


def _longest_alike(found: Sequence[BlockRange]) -> tuple[BlockRange, ...]:
    runs = [list(run) for _, run in groupby(found, key=_wiring)]
    best = max(runs, key=len, default=[])
    return tuple(best) if best and _is_eligible(best[0]) else ()


def _wiring(block_range: BlockRange) -> str:
    names = {node: f"in_{i} {layout(example(node))}" for i, node in enumerate(block_range.inputs)}
    rows = []
    for index, node in enumerate(block_range.nodes):
        rows.append(told(node, names.__getitem__))
        names[node] = f"op_{index}"
    return "\n".join(
        (*rows, *(names[node] for node in block_range.outputs), str(block_range.modes))
    )


def _ops(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """With those of the bodies of higher-order ops."""
    for node in nodes:
        yield node
        if node.op == "get_attr" and isinstance(body := attribute_of(node), fx.GraphModule):
            yield from _ops(body.graph.nodes)


def _is_eligible(block_range: BlockRange) -> bool:
    """Tensors and sizes in, tensors out, modes as around the graph; and each gradient is handed
    over by one op.

    If several ops of a range read an input, or one reads it twice, these gradients would be
    summed before those of other ranges are added, and the last bit of the sum would depend on it.
    (An anchor is a scalar, and its gradient means nothing.)
    """
    own = set(block_range.nodes)
    if any(block_range.modes) or any(
        node.target in _ON_STORAGE for node in _ops(block_range.nodes)
    ):
        return False
    for node in block_range.inputs:
        value = example(node)
        if not isinstance(value, Tensor | torch.SymInt) or is_traceable_wrapper_subclass(value):
            return False
        several = sum(_readings(user, node) for user in node.users if user in own) > 1
        if several and isinstance(value, Tensor) and value.requires_grad and value.dim() > 0:
            return False
    return all(isinstance(example(node), Tensor) for node in block_range.outputs)


def _readings(user: fx.Node, node: fx.Node) -> int:
    read: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), read.append)
    return read.count(node)
