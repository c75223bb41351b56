"""How many bytes of tensors are alive while each op of a captured graph runs.

In: an FX graph with fake-tensor values. Out: one `Live` per compute node, in compute order. A
tensor's memory lives from the op that makes it to the last reader of any view of it; what the
graph returns lives to the end. Gathered parameters belong to their group's gather and are not
counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.graph.owners import owner, producer
from graphshard.graph.program import compute_nodes, is_reduce, is_unshard, step_of
from graphshard.pricing.fusion import UNFUSED, Fusion
from graphshard.pricing.sizes import Sizes
from graphshard.schedule.plan import StepKind


@dataclass(frozen=True, slots=True)
class Live:
    """Bytes alive during one op, its own results included.

    inputs: of the graph; in backward these are the saved activations. made: by the graph's ops:
    activations in forward, temporaries in backward, as FSDPMemTracker names them. grads: those of
    `made` that are gradients on their way to a reduction, counted apart.
    """

    inputs: int
    made: int
    grads: int


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that several inputs of a graph may show; `name` tells two of them apart."""

    name: str
    size_bytes: int


def saved_memory(forward: fx.Graph) -> dict[str, Storage]:
    """What the outputs of `forward` show, by name: backward's inputs have the same names."""
    outputs: Any = forward.find_nodes(op="output")[0].args[0]
    nodes = [n for n in outputs if isinstance(n, fx.Node)]
    return {n.name: Storage(owner(n).name, tensor_bytes(owner(n))) for n in nodes}


def live_bytes(
    graph: fx.Graph,
    *,
    frees_inputs: bool,
    inputs: Mapping[str, Storage] = MappingProxyType({}),
    fusion: Fusion = UNFUSED,
) -> tuple[Live, ...]:
    """Bytes alive during each of `graphshard.graph.program.compute_nodes(graph)`.

    frees_inputs: an input's memory ends with its last reader (a boxed backward); else the caller
    holds it to the end. inputs: what inputs show, where several may show the same memory. Sizes
    that are symbols count with their hints.
    """
    count = len(compute_nodes(graph))
    # One running sum per kind of memory: what is added at birth is taken away after the last use.
    changes = {kind: [0] * (count + 1) for kind in ("inputs", "made", "grads")}
    for block in _blocks(graph, count, inputs, fusion):
        if block.kind == "inputs" and not frees_inputs:
            block.last = count - 1
        if block.last >= block.born:
            changes[block.kind][block.born] += block.size_bytes
            changes[block.kind][block.last + 1] -= block.size_bytes
    alive = dict.fromkeys(changes, 0)
    found = []
    for index in range(count):
        alive = {kind: alive[kind] + changes[kind][index] for kind in alive}
        found.append(Live(**alive))
    return tuple(found)


@dataclass(slots=True)
class _Block:
    """One piece of memory, alive during the compute ops `born` to `last`."""

    kind: str
    size_bytes: int
    born: int
    last: int


def _blocks(
    graph: fx.Graph, count: int, inputs: Mapping[str, Storage], fusion: Fusion
) -> list[_Block]:
    place = {node: i for i, node in enumerate(compute_nodes(graph))}
    times, ends = _times(graph, place, fusion)
    blocks: dict[fx.Node, _Block] = {}
    shown: dict[str, _Block] = {}
    for node in graph.nodes:
        now = times[node]
        for source in node.all_input_nodes:
            if (block := blocks.get(owner(source))) is not None:
                block.last = max(block.last, ends[node])
        for gradient in _reduced(node):
            if (block := blocks.get(owner(gradient))) is not None and block.kind == "made":
                block.kind = "grads"
        if owner(node) is node and (node.op == "placeholder" or node in place or _is_back(node)):
            kind = "made" if node in place else "inputs"
            born = now + 1 if _is_back(node) else _runs(producer(node), place, fusion)
            elsewhere = node in fusion.unstored or _is_on_host(node)
            size = 0 if elsewhere else sum(_size_bytes(t, kind) for t in _tensors(node))
            block = _Block(kind, size, born, ends[node])
            if node.op == "placeholder" and (memory := inputs.get(node.name)) is not None:
                block = shown.setdefault(memory.name, replace(block, size_bytes=memory.size_bytes))
            blocks[node] = block
    return list({id(block): block for block in blocks.values()}.values())


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
    return sum(_size_bytes(value, "made") for value in _tensors(node))


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    marks = is_unshard(node) or is_reduce(node)
    if not marks and isinstance(value := node.meta.get("val"), Tensor):
        yield value


def _size_bytes(value: Tensor, kind: str) -> int:
    """What the graph makes takes its whole storage. Saved tensors may be views of one storage, so
    of those only the elements count."""
    if kind == "made" and value.layout == torch.strided:
        return int(Sizes().quantity(value.untyped_storage().nbytes()))
    return int(Sizes().bytes(value))
