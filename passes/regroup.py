"""All-gathers carry what the plan says: several groups together, or a group in several parts."""

from torch import fx

from graphshard.errors import VerifyError
from graphshard.ir import CommStep, Program, identifier, set_step, step_of
from graphshard.step_plan import GroupInfo, Plan, Schedule, Step, StepKind


def regroup(program: Program, plan: Plan) -> Program:
    """Merge and split all-gathers as the plan's steps do.

    Before: one issue and one wait per group and direction. After: as many as the plan has; each
    parameter still travels once and is waited for before its first use, and the waits of one
    all-gather stand together. Groups are opened and released one by one, as before. Raises
    VerifyError if the plan gathers what the program does not.
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
