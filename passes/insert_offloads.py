"""Activations wait for backward on the host."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphshard.graph.owners import fills_memory, maker, owner
from graphshard.graph.program import (
    CommStep,
    Program,
    aliases,
    identifier,
    output_node,
    positions,
    run_input,
    set_step,
    step_of,
)
from graphshard.schedule.plan import StepKind


def insert_offloads(program: Program, offloaded: Mapping[str, int]) -> Program:
    """Copy to the host what the ops `offloaded` (name -> group) make and backward reads.

    Before: forward returns it, and backward reads it as an input. After: for each group forward
    issues one copy right after the last reader, and returns what the wait yields, which stands
    behind; backward issues one copy back and waits for it right before the first reader. Views read
    nothing: one that forward only returns, or that backward makes long before it is read, has moved
    to the copy. What shares its memory with other results, or has gaps, stays.
    """
    if program.forward is None or program.backward is None:
        return program
    inputs = {n.name: n for n in program.backward.graph.find_nodes(op="placeholder") if n.users}
    leaving: dict[int, list[fx.Node]] = {}
    for node in _saved_alone(program.forward.graph, program.num_outputs):
        group = offloaded.get(maker(node).name)
        if group is not None and node.name in inputs and fills_memory(node):
            leaving.setdefault(group, []).append(node)
    for group, nodes in leaving.items():
        name = identifier(program.groups[group].fqn)
        _offload(program.forward.graph, program.num_outputs, group, name, nodes)
        _reload(program.backward.graph, group, name, [inputs[node.name] for node in nodes])
    return program


def _saved_alone(graph: fx.Graph, num_outputs: int) -> Iterator[fx.Node]:
    """What forward saves for backward that shares its memory with nothing else that it returns."""
    outputs: Any = output_node(graph).args[0]
    shown = Counter(owner(node) for node in outputs if isinstance(node, fx.Node))
    for node in outputs[num_outputs:]:
        if isinstance(node, fx.Node) and shown[owner(node)] == 1:
            yield node


def _offload(
    graph: fx.Graph, num_outputs: int, group: int, name: str, nodes: Sequence[fx.Node]
) -> None:
    output, anchor = output_node(graph), _anchor(graph, group)
    with graph.inserting_after(_end_of_use(graph, nodes)):
        issue = graph.call_method("issue_offload", (run_input(graph), anchor, list(nodes)))
    issue._rename(f"offload_{name}")
    set_step(issue, CommStep(StepKind.OFFLOAD_ISSUE, group))
    held = dict(zip(nodes, _awaited(graph, issue, group, nodes), strict=True))
    outputs: Any = output.args[0]
    saved = [held.get(node, node) for node in outputs[num_outputs:]]
    output.args = (type(outputs)([*outputs[:num_outputs], *saved]),)


def _end_of_use(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The last node that reads `nodes`, or shows one of them: views of them that stood later have
    moved behind it."""
    output, order = output_node(graph), positions(graph)
    views = aliases(map(owner, nodes))
    shown = {view for node in nodes for view in _shown_through(node)}
    needed = {source for view in shown for source in view.all_input_nodes} - views.keys()
    readers = {user for view in views for user in view.users} - views.keys() - {output}
    last = max((*map(owner, nodes), *readers, *needed), key=order.__getitem__)
    for view in sorted(shown, key=order.__getitem__):
        if order[view] > order[last]:
            last.append(view)
            order[view], last = order[last], view
    return last


def _shown_through(node: fx.Node) -> Iterator[fx.Node]:
    """The views between `node` and the memory that it shows, itself included."""
    while node is not owner(node):
        yield node
        node = node.all_input_nodes[0]


def _reload(graph: fx.Graph, group: int, name: str, inputs: Sequence[fx.Node]) -> None:
    anchor = _anchor(graph, group)
    with graph.inserting_before(_begin_of_use(graph, inputs)):
        issue = graph.call_method("issue_reload", (run_input(graph), anchor, list(inputs)))
    issue._rename(f"reload_{name}")
    set_step(issue, CommStep(StepKind.RELOAD_ISSUE, group))
    for node, item in zip(inputs, _awaited(graph, issue, group, inputs), strict=True):
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user is not issue)


def _begin_of_use(graph: fx.Graph, inputs: Sequence[fx.Node]) -> fx.Node:
    """The first node that reads `inputs`, or the first of their views, which have moved to it."""
    order, views = positions(graph), aliases(inputs)
    first = min(
        (user for view in views for user in view.users if user not in views),
        key=order.__getitem__,
    )
    early = [view for view in views if view not in inputs and order[view] < order[first]]
    early.sort(key=order.__getitem__)
    for view in early:
        first.prepend(view)
    return early[0] if early else first


def _anchor(graph: fx.Graph, group: int) -> Any:
    """That of `group`, which says its name at run time; None if the graph does not open it."""
    for node in graph.nodes:
        step = step_of(node)
        if step is not None and (step.group, step.part) == (group, "open"):
            return node.args[1]
    return None


def _awaited(
    graph: fx.Graph, issue: fx.Node, group: int, copied: Sequence[fx.Node]
) -> list[fx.Node]:
    """The wait for a copy, right behind its issue, and what it yields for each of `copied`."""
    leaves = issue.target == "issue_offload"
    kind = StepKind.OFFLOAD_WAIT if leaves else StepKind.RELOAD_WAIT
    with graph.inserting_after(issue):
        wait = set_step(graph.call_method("wait", (issue,)), CommStep(kind, group))
    items: list[fx.Node] = []
    for place, node in enumerate(copied):
        with graph.inserting_after(items[-1] if items else wait):
            item = graph.call_function(operator.getitem, (wait, place))
        item.meta = dict(node.meta)
        item._rename(f"{node.name}_{'held' if leaves else 'back'}")
        items.append(set_step(item, CommStep(kind, group, "item")))
    return items
