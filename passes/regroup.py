"""Collectives carry what the plan says: several groups together, or a group in several parts."""

from typing import Any

from torch import fx

from graphshard.errors import VerifyError
from graphshard.graph.program import CommStep, Program, identifier, set_step, step_of
from graphshard.schedule.plan import GroupInfo, Plan, Schedule, Step, StepKind


def regroup(program: Program, plan: Plan) -> Program:
    """Merge and split all-gathers, and split reductions, as the plan's steps do.

    Before: one issue and one wait per group and direction. After: as many as the plan has; each
    parameter still travels once and is waited for before its first use, and the waits of one
    all-gather stand together. Groups are opened and released one by one, as before. Raises
    VerifyError if the plan gathers or reduces what the program does not.
    """
    modules = program.by_direction
    for schedule in plan.schedules:
        module = modules.get(schedule.direction)
        if module is None:
            continue
        for steps in _regrouped(schedule):
            if steps[0].with_groups:
                _merge(module.graph, steps[0])
            else:
                _split(module.graph, program.groups[steps[0].groups[0]], steps)
        parts: dict[int | None, list[Step]] = {}
        for step in schedule.of_kind(StepKind.REDUCE_ISSUE):
            if step.params:
                parts.setdefault(step.group, []).append(step)
        for steps in parts.values():
            _split_reduction(module.graph, program.groups[steps[0].groups[0]], steps)
    return program


def _regrouped(schedule: Schedule) -> list[list[Step]]:
    """Issues that merge, one a list, and the issues of each group that is split."""
    found: dict[tuple[int, ...], list[Step]] = {}
    for step in schedule.of_kind(StepKind.GATHER_ISSUE):
        if step.with_groups or step.params:
            found.setdefault(step.groups, []).append(step)
    return list(found.values())


def _merge(graph: fx.Graph, step: Step) -> None:
    """All groups are opened, issued and waited for where the first of them is."""
    nodes = [_nodes(graph, group) for group in step.groups]
    opened = [parts["open"] for parts in nodes]
    issue = nodes[0]["issue"]
    first = min(parts["issue"] for parts in nodes)  # fx nodes compare by their place in the graph
    for node in (*opened, issue):
        first.prepend(node)
    issue.args = (issue.args[0], *opened)
    last = issue
    for parts in nodes:
        wait = parts["wait"]
        wait.args = (issue, wait.args[1])
        last = _move_after(last, wait)
    for parts in nodes[1:]:
        graph.erase_node(parts["issue"])


def _split(graph: fx.Graph, info: GroupInfo, steps: list[Step]) -> None:
    """The group's one issue and one wait become one of each per step, at their place."""
    nodes = _nodes(graph, info.id)
    group, whole = nodes["open"], nodes["wait"]
    items = list(whole.users)
    for step in steps:
        name = identifier(info.params[step.params[0]].fqn)
        with graph.inserting_before(nodes["issue"]):
            issue = graph.call_method(
                "issue_gather", (group.args[0], group), {"params": step.params}
            )
        with graph.inserting_before(whole):
            wait = graph.call_method("wait", (issue, group))
        issue._rename(f"gather_{name}")
        wait._rename(f"params_{name}")
        set_step(issue, CommStep(StepKind.GATHER_ISSUE, info.id, params=step.params))
        set_step(wait, CommStep(StepKind.GATHER_WAIT, info.id, params=step.params))
        for item in (i for i in items if i.args[1] in step.params):
            item.args = (wait, item.args[1])
            set_step(item, CommStep(StepKind.GATHER_WAIT, info.id, "item", step.params))
    set_step(group, CommStep(StepKind.GATHER_ISSUE, info.id, "open", steps[0].params))
    if whole.users:
        raise VerifyError("GS310", f"the plan leaves out parameters of {info.fqn}")
    graph.erase_node(whole)
    graph.erase_node(nodes["issue"])


def _split_reduction(graph: fx.Graph, info: GroupInfo, steps: list[Step]) -> None:
    """The group's one reduction becomes one per step, at its place; so does its wait."""
    if info.replicated:
        raise VerifyError("GS310", f"replicas add up gradients of {info.fqn} as a whole")
    whole = _reduction(graph, info.id)
    (wait,) = whole.users
    opened, grads, indices = whole.args
    rows = {index: at for at, index in enumerate(indices)}
    left = set(rows)
    for step in steps:
        chosen = tuple(index for index in indices if index in step.params)
        left -= set(chosen)
        details = {
            name: tuple(values[rows[index]] for index in chosen)
            for name, values in whole.kwargs.items()
        }
        with graph.inserting_before(whole):
            issue = graph.call_method(
                "issue_reduce",
                (opened, [grads[rows[index]] for index in chosen], chosen),
                {**details, "part": step.params},
            )
        with graph.inserting_before(wait):
            waited = graph.call_method("wait", (issue,))
        name = identifier(info.params[step.params[0]].fqn)
        issue._rename(f"reduce_{name}")
        waited._rename(f"reduced_{name}")
        set_step(issue, CommStep(StepKind.REDUCE_ISSUE, info.id, params=step.params))
        set_step(waited, CommStep(StepKind.REDUCE_WAIT, info.id, params=step.params))
    if left:
        raise VerifyError("GS310", f"the plan leaves out gradients of {info.fqn}")
    set_step(opened, CommStep(StepKind.REDUCE_ISSUE, info.id, "open", steps[0].params))
    graph.erase_node(wait)
    graph.erase_node(whole)


def _reduction(graph: fx.Graph, group: int) -> Any:
    """The issue of the group's reduction. Raises VerifyError if it has none of its own."""
    for node in graph.find_nodes(op="call_method", target="issue_reduce"):
        if step_of(node) == CommStep(StepKind.REDUCE_ISSUE, group):
            return node
    raise VerifyError("GS310", f"the graph has no reduction of group {group}")


def _nodes(graph: fx.Graph, group: int) -> dict[str, fx.Node]:
    """The group's `open`, `issue` and `wait`. Raises VerifyError if it is not gathered alone."""
    for node in graph.find_nodes(op="call_method", target="wait"):
        if step_of(node) == CommStep(StepKind.GATHER_WAIT, group):
            issue, opened = node.args
            if step_of(issue) == CommStep(StepKind.GATHER_ISSUE, group):
                return {"open": opened, "issue": issue, "wait": node}
    raise VerifyError("GS310", f"the graph has no all-gather of group {group} alone")


def _move_after(place: fx.Node, wait: fx.Node) -> fx.Node:
    """`wait` and its items right behind `place`; returns the last of them."""
    for node in (wait, *wait.users):
        place.append(node)
        place = node
    return place
