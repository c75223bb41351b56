"""`unshard` marks become one all-gather per group."""

import operator
from collections.abc import Iterable

import torch
from torch import fx

from graphshard.graph.program import (
    CommStep,
    Mark,
    Program,
    anchor_of,
    identifier,
    positions,
    run_input,
    set_step,
    unshard_marks,
)
from graphshard.schedule.plan import GroupInfo, StepKind


def insert_gathers(program: Program) -> Program:
    """Replace the marks of each group by issue, wait and one item per parameter.

    Before: `unshard` marks. After: no mark is left; the issue and the wait of a group stand
    right before the first use of any of its parameters. All parameters of a group travel
    together, in registration order, whether this graph uses them or not.
    """
    for module in program.directions:
        marks: dict[int, list[Mark]] = {}
        for mark in unshard_marks(module.graph):
            marks.setdefault(mark.group, []).append(mark)
        order = positions(module.graph)
        for group, found in marks.items():
            first = min((u for m in found for u in m.node.users), key=order.__getitem__)
            with module.graph.inserting_before(first):
                _insert(module.graph, program.groups[group], found)
    return program


def _insert(graph: fx.Graph, info: GroupInfo, marks: list[Mark]) -> None:
    name = identifier(info.fqn)
    group = open_group(graph, anchor_of(marks[0]), info, _dtypes(info, marks))
    issue = graph.call_method("issue_gather", (group.args[0], group))
    wait = graph.call_method("wait", (issue, group))
    issue._rename(f"gather_{name}")
    wait._rename(f"params_{name}")
    set_step(issue, CommStep(StepKind.GATHER_ISSUE, info.id))
    set_step(wait, CommStep(StepKind.GATHER_WAIT, info.id))
    for mark in marks:
        item = graph.call_function(operator.getitem, (wait, mark.index))
        item.meta = dict(mark.node.meta)
        item._rename(identifier(info.params[mark.index].fqn))
        set_step(item, CommStep(StepKind.GATHER_WAIT, info.id, "item"))
        mark.node.replace_all_uses_with(item)
        graph.erase_node(mark.node)


def open_group(
    graph: fx.Graph, anchor: fx.Node, info: GroupInfo, dtypes: Iterable[torch.dtype] = ()
) -> fx.Node:
    """`run.open(anchor, *dtypes)`."""
    group = graph.call_method("open", (run_input(graph), anchor, *dtypes))
    group._rename(f"group_{identifier(info.fqn)}")
    return set_step(group, CommStep(StepKind.GATHER_ISSUE, info.id, "open"))


def _dtypes(info: GroupInfo, marks: list[Mark]) -> tuple[torch.dtype, ...]:
    # Parameters that this graph does not use travel in their planned dtype.
    dtypes = [getattr(torch, p.wire_dtype) for p in info.params]
    for mark in marks:
        dtypes[mark.index] = mark.node.args[2]
    return (dtypes[0],) if len(set(dtypes)) == 1 else tuple(dtypes)
