"""How many bytes of tensors are alive while each op of a captured graph runs.

In: an FX graph with fake-tensor values. Out: one `Live` per compute node, in compute order. A
tensor's memory lives from the op that makes it to the last reader of any view of it; what the
graph returns lives to the end. Gathered parameters belong to their group's gather and are not
counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.graph.owners import owner, producer
from graphshard.graph.program import compute_nodes, is_reduce, is_unshard, step_of
from graphshard.pricing.fusion import UNFUSED, Fusion
from graphshard.pricing.sizes import HINTS
from graphshard.schedule.plan import StepKind

# In a node's `meta`: the user's checkpoint policy says MUST_SAVE.
WANTED = "graphshard_wanted"


class Kind(StrEnum):
    """inputs: of the graph; in backward these are the saved activations. made: by the graph's ops:
    activations in forward, temporaries in backward, as FSDPMemTracker names them. grads: those of
    `made` that are gradients on their way to a reduction, counted apart."""

    INPUTS = "inputs"
    MADE = "made"
    GRADS = "grads"


@dataclass(frozen=True, slots=True)
class Live:
    """Bytes alive during one op, its own results included; see `Kind`."""

    inputs: int
    made: int
    grads: int


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that several inputs of a graph may show; `name` tells two of them apart."""

    name: str
    size_bytes: int


@dataclass(slots=True)
class Memory:
    """One piece of memory, alive during the compute ops `born` to `last`. name: of the node that
    makes it, in forward where backward has it as an input. is_wanted: the user's checkpoint policy
    says that it be saved."""

    name: str
    kind: Kind
    size_bytes: int
    born: int
    last: int
    is_wanted: bool = False


def saved_memory(forward: fx.Graph) -> dict[str, Storage]:
    """What the outputs of `forward` show, by name: backward's inputs have the same names."""
    outputs: Any = forward.find_nodes(op="output")[0].args[0]
    nodes = [n for n in outputs if isinstance(n, fx.Node)]
    return {n.name: Storage(owner(n).name, tensor_bytes(owner(n))) for n in nodes}


def summed(memories: Sequence[Memory], count: int) -> tuple[Live, ...]:
    """What is alive during each of `count` ops."""
    # One running sum per kind of memory: what is added at birth is taken away after the last use.
    changes = {kind: [0] * (count + 1) for kind in Kind}
    for memory in memories:
        if memory.last >= memory.born:
            changes[memory.kind][memory.born] += memory.size_bytes
            changes[memory.kind][memory.last + 1] -= memory.size_bytes
    alive = dict.fromkeys(changes, 0)
    found = []
    for index in range(count):
        alive = {kind: alive[kind] + changes[kind][index] for kind in alive}
        found.append(Live(alive[Kind.INPUTS], alive[Kind.MADE], alive[Kind.GRADS]))
    return tuple(found)


def memories(
    graph: fx.Graph,
    *,
    frees_inputs: bool,
    inputs: Mapping[str, Storage] = MappingProxyType({}),
    fusion: Fusion = UNFUSED,
) -> tuple[Memory, ...]:
    """Every piece of memory that is alive during some of
    `graphshard.graph.program.compute_nodes(graph)`.

    frees_inputs: an input's memory ends with its last reader (a boxed backward); else the caller
    holds it to the end. inputs: what inputs show, where several may show the same memory. Sizes
    that are symbols count with their hints.
    """
    place = {node: i for i, node in enumerate(compute_nodes(graph))}
    times, ends = _times(graph, place, fusion)
    blocks: dict[fx.Node, Memory] = {}
    shown: dict[str, Memory] = {}
    for node in graph.nodes:
        now = times[node]
        for source in node.all_input_nodes:
            if (block := blocks.get(owner(source))) is not None:
                block.last = max(block.last, ends[node])
        for gradient in _reduced(node):
            if (block := blocks.get(owner(gradient))) is not None and block.kind is Kind.MADE:
                block.kind = Kind.GRADS
        if owner(node) is node and (node.op == "placeholder" or node in place or _is_back(node)):
            kind = Kind.MADE if node in place else Kind.INPUTS
            born = now + 1 if _is_back(node) else _runs(producer(node), place, fusion)
            elsewhere = node in fusion.unstored or _is_on_host(node)
            size = 0 if elsewhere else sum(_size_bytes(t, kind) for t in _tensors(node))
            block = Memory(node.name, kind, size, born, ends[node], WANTED in node.meta)
            if node.op == "placeholder" and (storage := inputs.get(node.name)) is not None:
                own = replace(block, name=storage.name, size_bytes=storage.size_bytes)
                block = shown.setdefault(storage.name, own)
            blocks[node] = block
    found = {id(block): block for block in blocks.values()}
    for block in found.values():
        if block.kind is Kind.INPUTS and not frees_inputs:
            block.last = len(place) - 1
    return tuple(found.values())


def _runs(node: fx.Node, place: Mapping[fx.Node, int], fusion: Fusion) -> int:
    return max(place.get(node, 0), fusion.delayed.get(node, 0))


def _is_back(node: fx.Node) -> bool:
    """What a copy from the host has brought back."""
    step = step_of(node)
    return step is not None and step.kind is StepKind.RELOAD_WAIT and step.part == "item"


def _is_on_host(node: fx.Node) -> bool:
    """An input that is copied from the host."""
    readers = [step_of(user) for user in node.users]
    return any(step is not None and step.kind is StepKind.RELOAD_ISSUE for step in readers)


def _times(
    graph: fx.Graph, place: Mapping[fx.Node, int], fusion: Fusion
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """For each node the op at which it runs, and the op at which what it reads was last needed.

    The second is later where a kernel runs later than the op stands. Where a result is not stored
    the kernels that it is part of read again what it reads, while they write theirs.
    """
    times: dict[fx.Node, int] = {}
    clock = 0  # compute ops before the current node
    for node in graph.nodes:
        # A communication step stands between two ops; the first one still has the memory.
        times[node] = len(place) - 1 if node.op == "output" else place.get(node, clock - 1)
        clock += node in place
    ends = {node: max(time, fusion.delayed.get(node, 0)) for node, time in times.items()}
    for node in reversed(graph.nodes):
        if owner(node) in fusion.unstored:
            ends[node] = max([ends[node], *(ends[user] for user in node.users)])
    return times, ends


def _reduced(node: fx.Node) -> Sequence[fx.Node]:
    """The gradients that a mark or an issue of a reduction reads."""
    if is_reduce(node):
        return node.all_input_nodes[:1]
    step = step_of(node)
    issues = step is not None and step.kind is StepKind.REDUCE_ISSUE
    return node.all_input_nodes if issues else ()


def tensor_bytes(node: fx.Node) -> int:
    """Of what a node makes, its whole storage."""
    return sum(_size_bytes(value, Kind.MADE) for value in _tensors(node))


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    marks = is_unshard(node) or is_reduce(node)
    if not marks and isinstance(value := node.meta.get("val"), Tensor):
        yield value


def _size_bytes(value: Tensor, kind: Kind) -> int:
    """What the graph makes takes its whole storage. Saved tensors may be views of one storage, so
    of those only the elements count."""
    if kind is Kind.MADE and value.layout == torch.strided:
        return int(HINTS.quantity(value.untyped_storage().nbytes()))
    return int(HINTS.bytes(value))
