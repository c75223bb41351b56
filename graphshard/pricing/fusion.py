"""What a compiler makes of pointwise ops, as far as memory is concerned.

In: the compute nodes of a graph, and the places at which the regions start that are compiled one by
one. Out: results that no kernel stores, and the ops that run later than they stand.

Assumed of Inductor, whose code was read: pointwise ops that read the same memory become one kernel,
unless one of them needs what another makes and what no kernel can have beside it (a product). The
kernel runs where the last of them stands, since it needs all that they read; whatever reads a
result of it comes later still.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphshard.graph.owners import owner
from graphshard.graph.program import CASTS, is_view

aten = torch.ops.aten

# Inductor computes each element of these from an index (torch/_inductor/lowering.py), and of a
# number put into constant rows, too (fx_passes/post_grad.py, scatter_upon_const_tensor).
_CONSTANT = (aten.full.default, aten.full_like.default, aten.zeros_like.default)
_PICKS = (aten.gather.default, *_CONSTANT)


@dataclass(frozen=True, slots=True)
class Fusion:
    """unstored: see `never_stored`. delayed: see `delayed`."""

    unstored: Container[fx.Node]
    delayed: Mapping[fx.Node, int]


UNFUSED = Fusion((), MappingProxyType({}))


def fusion_of(nodes: Sequence[fx.Node], starts: Collection[int]) -> Fusion:
    """nodes, starts: see `never_stored`."""
    unstored = never_stored(nodes, starts)
    return Fusion(unstored, delayed(nodes, starts, unstored))


def never_stored(nodes: Sequence[fx.Node], starts: Collection[int]) -> dict[fx.Node, None]:
    """Results of pointwise ops that only fusible ops of the same region read, but for what these
    read again (see `fused_traffic`).

    nodes: `compute_nodes` of a graph. starts: the places in `nodes` at which regions start.
    """
    return {node: None for node, times in fused_traffic(nodes, starts).items() if times == 0}


def fused_traffic(nodes: Sequence[fx.Node], starts: Collection[int]) -> dict[fx.Node, int]:
    """Of what only fusible ops of the same region read, how often it goes to or from memory: never,
    or twice where one kernel makes it and a number of all of it (the largest, for a scale), and the
    next one reads it.

    No kernel knows such a number before it has read all. torchao's own estimate of casts to float8
    (testing/training/roofline_utils.py, tensorwise, fused with what comes before) writes it once
    and reads it once, too. nodes, starts: see `never_stored`.
    """
    needed = _needed_with_numbers(nodes, starts)
    return {node: 2 if node in needed else 0 for node in _fused_away(nodes, starts)}


def _fused_away(nodes: Sequence[fx.Node], starts: Collection[int]) -> dict[fx.Node, None]:
    """Results of pointwise ops that only fusible ops of the same region read."""
    region_of = {
        node: number for number, region in enumerate(_regions(nodes, starts)) for node in region
    }

    def fusible(reader: fx.Node, region: int) -> bool:
        return region_of.get(reader) == region and is_fusible(reader)

    return {
        node: None
        for node in nodes
        if is_pointwise(node) and all(fusible(reader, region_of[node]) for reader in _readers(node))
    }


def _needed_with_numbers(nodes: Sequence[fx.Node], starts: Collection[int]) -> dict[fx.Node, None]:
    """What an op is made of, by fused ops, together with a number that was made of it, too: of a
    chain of such the last."""
    found: dict[fx.Node, None] = {}
    for region in _regions(nodes, starts):
        bits = {node: 1 << place for place, node in enumerate(region)}
        made_of: dict[fx.Node, int] = {}  # itself and what it is made of by fused ops, as `bits`
        needs: dict[fx.Node, int] = {}  # of these, what the numbers that it needs are made of
        for node in region:
            made_of[node], needs[node] = bits[node] if _is_fused(node) else 0, 0
            for source in map(owner, node.all_input_nodes if _is_fused(node) else ()):
                needs[node] |= needs.get(source, 0)
                made_of[node] |= 0 if _is_number(source) else made_of.get(source, 0)
            others = made_of[node] & ~needs[node]
            for place in _places(made_of[node] & needs[node]):
                if any(bits.get(reader, 0) & others for reader in _readers(region[place])):
                    found[region[place]] = None
            if _is_number(node):
                needs[node] |= made_of[node]
    return found


def _places(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def delayed(
    nodes: Sequence[fx.Node], starts: Collection[int], unstored: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """The places in `nodes` at which ops run that wait for the last op of the kernel that they, or
    what they read, are a part of. unstored: see `never_stored`."""
    found: dict[fx.Node, int] = {}
    first = 0
    for region in _regions(nodes, starts):
        place = {node: first + index for index, node in enumerate(region)}
        latest = _kernel_ends(region, place, unstored)
        first += len(region)
        for node in region:
            # What is not in the kernel comes after it.
            after = 0 if _is_fused(node) else 1
            before = [found[source] + after for source in node.all_input_nodes if source in found]
            runs = min(max([latest.get(node, 0), *before]), first - 1)
            if runs > place[node]:
                found[node] = runs
    return found


def _kernel_ends(
    region: Sequence[fx.Node], place: Mapping[fx.Node, int], unstored: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Where the last op stands that is written by the same kernel, of each that has one."""
    written = [n for n in region if is_pointwise(n) and n not in unstored]
    bits = {node: 1 << index for index, node in enumerate(written)}
    needed = _needed_first(region, bits)
    reads = _reads(region, unstored)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in written:
        for source in reads[node]:
            readers.setdefault(source, []).append(node)
    found: dict[fx.Node, int] = {}
    for node in written:
        together = (
            place[other]
            for source in reads[node]
            if _is_as_large(source, node)
            for other in readers[source]
            if _is_as_large(other, node) and not needed[other] & bits[node]
        )
        found[node] = max(together, default=place[node])
    return found


def _needed_first(region: Sequence[fx.Node], bits: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Which of `bits`, as a set of them, have to be in memory before each op may run: a path from
    there comes through an op that is not fused."""
    reached: dict[fx.Node, int] = {}
    found: dict[fx.Node, int] = {}
    for node in region:
        reached[node] = found[node] = 0
        for source in node.all_input_nodes:
            if source in reached:
                reached[node] |= reached[source] | bits.get(source, 0)
                found[node] |= found[source] if _is_fused(source) else reached[source]
    return found


def _reads(
    region: Sequence[fx.Node], unstored: Collection[fx.Node]
) -> dict[fx.Node, dict[fx.Node, None]]:
    """The memory that each op reads, itself or through what is not stored."""
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in region:
        found[node] = {}
        for source in node.all_input_nodes:
            memory = owner(source)
            is_inside = memory in unstored and memory in found
            found[node] |= found[memory] if is_inside else {memory: None}
    return found


def _regions(nodes: Sequence[fx.Node], starts: Collection[int]) -> Iterator[Sequence[fx.Node]]:
    cuts = sorted({0, *starts, len(nodes)})
    for start, stop in pairwise(cuts):
        yield nodes[start:stop]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the node's memory, through views."""
    for user in node.users:
        if is_view(user) and user.args[0] is node:
            yield from _readers(user)
        else:
            yield user


def _is_as_large(one: fx.Node, other: fx.Node) -> bool:
    """Two tensors of equally many elements: one loop goes over both."""
    values = one.meta.get("val"), other.meta.get("val")
    if not all(isinstance(value, Tensor) for value in values):
        return False
    return statically_known_true(values[0].numel() == values[1].numel())  # type: ignore[union-attr]


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and statically_known_true(value.numel() == 1)


def _is_fused(node: fx.Node) -> bool:
    return is_view(node) or is_fusible(node)


def is_pointwise(node: fx.Node) -> bool:
    """By torch's tag, which a cast lacks until it is decomposed; and what picks from, or puts into,
    what need not be in memory for that."""
    if node.target in (*CASTS, *_PICKS) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return node.target is aten.scatter.value and _is_constant(node.args[0])


def _is_constant(value: object) -> bool:
    return isinstance(value, fx.Node) and value.target in _CONSTANT


def is_fusible(node: fx.Node) -> bool:
    return is_pointwise(node) or torch.Tag.reduction in getattr(node.target, "tags", ())
