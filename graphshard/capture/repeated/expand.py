"""The ops of each repeated block back in the joint graph, in the place of its calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from graphshard.capture.repeated.trace import BLOCK, BLOCK_GRAD, RepeatedBlock
from graphshard.graph.program import adopt, attribute_of, note_attributes

_CHECKPOINT = "ac_graph_id"  # of one call of torch.utils.checkpoint; they rise in call order
_MANY = 1_000_000  # more than there are checkpoints in one repeated block

Env = dict[fx.Node, fx.Node]


def expanded(joint: fx.GraphModule, blocks: Sequence[RepeatedBlock]) -> fx.GraphModule:
    """`joint` with the ops of each repeated block in the place of its calls, changed in place.

    What a block ran in forward stands in the place of its forward call, and its backward reads
    these results: it is the graph that AOTAutograd would have traced of the whole.
    """
    note_attributes(joint.graph)
    envs: dict[int, Env] = {}
    forwards = [_forward(block) for block in blocks]
    for node in list(joint.graph.nodes):
        if node.target is BLOCK:
            tensors, sizes, number, instance = node.args
            block, forward = blocks[number], forwards[number]
            env = envs[instance] = dict(zip(block.placeholders, (*tensors, *sizes), strict=False))
            _copy(node, (n for n in block.graph.nodes if n in forward), env, instance)
            _replace(node, [env[n] for n in block.results])
        elif node.target is BLOCK_GRAD:
            tensors, sizes, tangents, number, instance = node.args
            block, forward, env = blocks[number], forwards[number], envs[instance]
            env.update(zip(block.placeholders[len(tensors) + len(sizes) :], tangents, strict=True))
            _copy(node, (n for n in block.graph.nodes if n not in forward), env, instance)
            gradients = [env[n] for n in block.gradients if n is not None]
            _replace(node, gradients)
            _add_up_at_once(gradients)
    _renumber(joint.graph)
    return joint


def _forward(block: RepeatedBlock) -> set[fx.Node]:
    """The ops that ran in forward: AOTAutograd marks them, but passes may have replaced some."""
    late = set(block.placeholders[len(block.placeholders) - sum(block.differentiable) :])
    needed = set(block.results)
    for node in reversed(block.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    found = set()
    for node in block.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_early = node in needed or node.meta.get("partitioner_tag") == "is_forward"
        if is_early and late.isdisjoint(node.all_input_nodes):
            found.add(node)
        else:
            late.add(node)
    return found


def _copy(call: fx.Node, nodes: Iterable[fx.Node], env: Env, instance: int) -> None:
    """`nodes` in front of `call`; env: what stands for the nodes that they read."""
    graph = call.graph
    with graph.inserting_before(call):
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = copy = graph.node_copy(node, env.__getitem__)
            if node.op == "get_attr":
                assert graph.owning_module is not None
                copy.target = adopt(graph.owning_module, attribute_of(node), str(node.target))
            if _CHECKPOINT in copy.meta:
                copy.meta[_CHECKPOINT] += (instance + 1) * _MANY


def _replace(call: fx.Node, results: Sequence[fx.Node]) -> None:
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        user.graph.erase_node(user)
    call.graph.erase_node(call)


def _add_up_at_once(gradients: Sequence[fx.Node]) -> None:
    """Autograd adds a gradient to others of the same tensor when the op that it differentiates is
    done, and does not wait for the end of the repeated block."""
    for node in gradients:
        for user in list(node.users):
            if user.target is torch.ops.aten.add.Tensor:
                last = max(user.all_input_nodes)
                while _op_number(last.next) == _op_number(last) is not None:
                    last = last.next
                last.append(user)


def _op_number(node: fx.Node) -> int | None:
    """Of the op in forward that the node differentiates."""
    return node.meta.get("seq_nr")


def _renumber(graph: fx.Graph) -> None:
    """Checkpoints rise in the order of the graph again."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if _CHECKPOINT in node.meta:
            number = node.meta[_CHECKPOINT]
            node.meta[_CHECKPOINT] = numbers.setdefault(number, len(numbers))
