"""Which ops of forward may run once more in backward, and make the same there."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from graphshard.graph.owners import maker, owner, producer
from graphshard.graph.program import output_node, step_of
from graphshard.graph.random_ops import is_random


def repeatable(
    ops: Sequence[fx.Node],
    group: int,
    returned: Collection[fx.Node],
    written: Collection[fx.Node],
    decisive: Collection[fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Those of `ops` that only they themselves read, and that may run twice with no parameters but
    those of `group`, each with its maker. A result of an op with several comes with that op: such
    an op itself cannot be saved."""
    own = set(ops)
    return {
        node: maker(node)
        for node in ops
        if _repeatable(node)
        and producer(node) not in decisive
        and (node.target is not operator.getitem or node.args[0] in own)
        and owner(node) not in returned
        and not _reads(node, written)
        and not _reads_others(node, group)
        and all(user in own or user.op == "output" for user in node.users)
    }


def _reads_others(node: fx.Node, group: int) -> bool:
    """Whether `node` reads parameters of another group, which need not be there in backward."""
    steps = (step_of(owner(source)) for source in node.all_input_nodes)
    return any(step is not None and step.group != group for step in steps)


def _reads(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether `node`, or the op of which it is a result, reads one of `inputs`."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return any(owner(read) in inputs for read in source.all_input_nodes)


def _repeatable(node: fx.Node) -> bool:
    target = node.target
    if "recompute" in node.meta or node.op != "call_function":
        return False
    if target is operator.getitem:  # it has no life of its own
        source = node.args[0]
        return isinstance(source, fx.Node) and _repeatable(source)
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") == "_operator"
    return not target._schema.is_mutable and not is_random(node)


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that have another value in backward: AOTAutograd returns what the graph writes to
    them, and copies it there when forward is over."""
    described = output_node(graph).meta.get("desc", ())
    inputs = [d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)]
    return {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in inputs}


def size_deciders(graph: fx.Graph) -> set[fx.Node]:
    """Ops that find a size in data, and the masks and indices that lead there. Computed again,
    something before them may have another last bit, and then the size is another one."""
    found = {node for node in graph.nodes if node.meta.get("unbacked_bindings")}
    queue = list(found)
    while queue:
        for source in queue.pop().all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, Tensor) and not value.is_floating_point() and source not in found:
                found.add(source)
                queue.append(source)
    return found
