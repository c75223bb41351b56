"""`reduce_grad` marks become one reduce-scatter per group, and an all-reduce over replicas."""

from typing import Any

from torch import fx

from graphshard.graph.program import (
    CommStep,
    Mark,
    Program,
    anchor_of,
    identifier,
    is_tangent,
    output_node,
    positions,
    reduce_marks,
    run_input,
    set_step,
)
from graphshard.passes.insert_gathers import open_group
from graphshard.schedule.plan import GroupInfo, StepKind


def insert_reductions(program: Program) -> Program:
    """Issue a group's reduce-scatter when its last gradient is ready; wait at the end. If replicas
    of the group add up what was reduced, that all-reduce follows the wait.

    Before: `reduce_grad` marks whose tokens are the gradients of the anchors. After: no mark and
    no token is left, the anchors' gradients are None; gradients are packed in registration
    order. No-op under no_grad.
    """
    if program.backward is None:
        return program
    graph = program.backward.graph
    marks: dict[int, list[Mark]] = {}
    for mark in reduce_marks(graph):
        marks.setdefault(mark.group, []).append(mark)
    order = positions(graph)
    masks = _tangent_masks(graph, [m for found in marks.values() for m in found])
    for group, found in marks.items():
        last = max(found, key=lambda m: order[m.node]).node
        with graph.inserting_before(last):
            issue = _insert(graph, program.groups[group], found, masks)
        with graph.inserting_before(output_node(graph)):
            wait = graph.call_method("wait", (issue,))
        wait._rename(issue.name.replace("reduce_", "reduced_", 1))
        set_step(wait, CommStep(StepKind.REDUCE_WAIT, group))
        if program.groups[group].replicated:
            _all_reduce(graph, wait, group)
    _drop_tokens(graph)
    return program


def _all_reduce(graph: fx.Graph, reduced: fx.Node, group: int) -> None:
    with graph.inserting_before(output_node(graph)):
        issue = graph.call_method("issue_all_reduce", (run_input(graph), reduced))
        wait = graph.call_method("wait", (issue,))
    for node, word, kind in (
        (issue, "all_reduce_", StepKind.ALL_REDUCE_ISSUE),
        (wait, "all_reduced_", StepKind.ALL_REDUCE_WAIT),
    ):
        node._rename(reduced.name.replace("reduced_", word, 1))
        set_step(node, CommStep(kind, group))


def _insert(
    graph: fx.Graph, info: GroupInfo, marks: list[Mark], masks: dict[fx.Node, int]
) -> fx.Node:
    marks = sorted(marks, key=lambda m: m.index)
    group = open_group(graph, anchor_of(marks[0]), info)
    set_step(group, CommStep(StepKind.REDUCE_ISSUE, info.id, "open"))
    group._rename(f"group_{identifier(info.fqn)}")
    grads, indices = [m.node.args[0] for m in marks], tuple(m.index for m in marks)
    details: dict[str, Any] = {}
    if masks:
        details["tangents"] = tuple(masks[m.node] for m in marks)
    if any(m.layout >= 0 for m in marks):
        details["layouts"] = tuple(m.layout for m in marks)
    issue = graph.call_method("issue_reduce", (group, grads, indices), details)
    issue._rename(f"reduce_{identifier(info.fqn)}")
    return set_step(issue, CommStep(StepKind.REDUCE_ISSUE, info.id))


def _tangent_masks(graph: fx.Graph, marks: list[Mark]) -> dict[fx.Node, int]:
    """For each mark the bit set of the tangents it depends on; empty with one tangent only."""
    tangents = [n for n in graph.nodes if is_tangent(n)]
    if len(tangents) < 2:
        return {}
    reach = {tangent: 1 << bit for bit, tangent in enumerate(tangents)}
    for node in graph.nodes:
        if node not in reach:
            reach[node] = 0
            for source in node.all_input_nodes:
                reach[node] |= reach[source]
    # A gradient that no tangent reaches is a constant: it exists whatever is missing.
    return {mark.node: reach[mark.node] or -1 for mark in marks}


def _drop_tokens(graph: fx.Graph) -> None:
    """Erase the marks and the sums of their tokens; outputs that were tokens become None."""
    out = output_node(graph)
    tokens = {mark.node: None for mark in reduce_marks(graph)}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(i in tokens for i in inputs):
            tokens[node] = None
    out.args = fx.node.map_arg(out.args, lambda n: None if n in tokens else n)
    for node in reversed(list(tokens)):
        graph.erase_node(node)
