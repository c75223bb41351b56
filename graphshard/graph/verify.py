"""The rules of the graph side, checked after every pass.

Each rule has a code, a sentence and a function that yields what breaks it. A broken rule names
the rule, the group, the parameter and shows the ten nodes around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.errors import VerifyError
from graphshard.graph.owners import owner
from graphshard.graph.program import (
    CommStep,
    Program,
    aliases,
    awaited_group,
    copied_tensors,
    derived,
    gathered_groups,
    gets_something_else,
    is_unshard,
    output_node,
    positions,
    reduce_marks,
    step_of,
    steps,
    unshard_marks,
    waits_of,
    window,
)
from graphshard.schedule.plan import StepKind
from graphshard.schedule.steps import ISSUES


@dataclass(frozen=True, slots=True)
class Broken:
    """One place where a rule does not hold."""

    graph: fx.Graph
    node: fx.Node
    group: int | None
    index: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    sentence: str
    check: Callable[[Program], Iterator[Broken]]


def verify(program: Program, after: str) -> None:
    """Check every rule. Raises VerifyError for the first that does not hold after pass `after`."""
    for module in program.graphs:
        try:
            module.graph.lint()
        except RuntimeError as error:
            message = f"after pass {after!r}: the graph is well formed; {error}"
            raise VerifyError("GS309", message) from error
    for rule in RULES:
        for broken in rule.check(program):
            raise VerifyError(rule.code, _message(program, rule, broken, after))


def _message(program: Program, rule: Rule, broken: Broken, after: str) -> str:
    lines = [f"after pass {after!r}: {rule.sentence}; {broken.detail}"]
    if broken.group is not None and 0 <= broken.group < len(program.groups):
        group = program.groups[broken.group]
        lines.append(f"group {group.id}: {group.fqn}")
        if broken.index is not None and broken.index < len(group.params):
            lines.append(f"parameter: {group.params[broken.index].fqn}")
    return "\n".join([*lines, window(broken.graph, broken.node)])


def _marks_name_their_group(program: Program) -> Iterator[Broken]:
    for module in program.graphs:
        for mark in (*unshard_marks(module.graph), *reduce_marks(module.graph)):
            known = 0 <= mark.group < len(program.groups)
            if not known or not 0 <= mark.index < len(program.groups[mark.group].params):
                yield Broken(module.graph, mark.node, mark.group, mark.index, "unknown identity")


def _gradients_reach_the_output(program: Program) -> Iterator[Broken]:
    for module in program.graphs:
        for mark in reduce_marks(module.graph):
            if not mark.node.users:
                yield Broken(module.graph, mark.node, mark.group, mark.index, "its token is unused")


def _nothing_gathered_is_saved(program: Program) -> Iterator[Broken]:
    if program.forward is None or program.backward is None:
        return
    graph = program.forward.graph
    saved = output_node(graph).args[0][program.num_outputs :]  # type: ignore[index]
    for root, group, index in _gathered_roots(graph):
        for node in derived([root]):
            if node in saved:  # type: ignore[operator]
                yield Broken(graph, node, group, index, f"{node.name} is saved for backward")


def _gathered_roots(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    for mark in unshard_marks(graph):
        yield mark.node, mark.group, mark.index
    for wait, step in steps(graph, StepKind.GATHER_WAIT):
        for item in wait.users:
            yield item, step.group, int(item.args[1])  # type: ignore[arg-type]


def _everything_happens_once(program: Program) -> Iterator[Broken]:
    for module in program.directions:
        seen: set[tuple[StepKind, int, int]] = set()
        for node in module.graph.nodes:
            step = step_of(node)
            if step is None or step.part != "head":
                continue
            if step.kind in ISSUES:
                yield from _one_wait_each(module.graph, node, step)
            for group, index in _subjects(program, node, step):
                if (step.kind, group, index) in seen:
                    yield Broken(module.graph, node, group, None, f"second {step.kind}")
                    break
                seen.add((step.kind, group, index))
        for group, index, open_node in _gathered_parameters(program, module.graph):
            if (StepKind.GATHER_ISSUE, group, index) not in seen:
                yield Broken(module.graph, open_node, group, index, "it never travels")


def _one_wait_each(graph: fx.Graph, issue: fx.Node, step: CommStep) -> Iterator[Broken]:
    waits = waits_of(issue)
    if step.kind is not StepKind.GATHER_ISSUE:
        if len(waits) != 1:
            yield Broken(graph, issue, step.group, None, f"{len(waits)} waits")
        return
    awaited = [awaited_group(wait) for wait in waits]
    for opened in dict.fromkeys((*gathered_groups(issue), *awaited)):
        count = awaited.count(opened) if opened in gathered_groups(issue) else 0
        if count != 1:
            yield Broken(graph, issue, _group_of(opened), None, f"{count} waits")


def _subjects(program: Program, node: fx.Node, step: CommStep) -> Iterator[tuple[int, int]]:
    """Groups, and parameters of collectives, that a step is about; -1: the whole group."""
    if step.kind is StepKind.GATHER_ISSUE:
        for opened in gathered_groups(node):
            group = _group_of(opened)
            yield from ((group, index) for index in _travelling(program, node, group))
    elif step.kind in (StepKind.REDUCE_ISSUE, StepKind.REDUCE_WAIT):
        yield from ((step.group, index) for index in step.params or (-1,))
    elif step.kind is not StepKind.GATHER_WAIT:  # these are counted at their issue
        yield step.group, -1


def _travelling(program: Program, issue: fx.Node, group: int) -> Sequence[int]:
    chosen: Sequence[int] = issue.kwargs.get("params", ())  # type: ignore[assignment]
    return chosen or range(len(program.groups[group].params))


def _gathered_parameters(program: Program, graph: fx.Graph) -> Iterator[tuple[int, int, fx.Node]]:
    """Every parameter of the groups that this graph gathers, once."""
    opened = {
        _group_of(n): n for i, _ in steps(graph, StepKind.GATHER_ISSUE) for n in gathered_groups(i)
    }
    for group, node in opened.items():
        for index in range(len(program.groups[group].params)):
            yield group, index, node


def _group_of(node: fx.Node) -> int:
    step = step_of(node)
    assert step is not None
    return step.group


def _uses_lie_before_the_release(program: Program) -> Iterator[Broken]:
    for module in program.directions:
        order = positions(module.graph)
        for release, step in steps(module.graph, StepKind.RELEASE):
            for wait in _waits_for_group(release.args[0]):  # type: ignore[arg-type]
                if order[wait] > order[release]:
                    yield Broken(
                        module.graph, release, step.group, None, "released before its wait"
                    )
                for item in wait.users:
                    for node in aliases([item]):
                        late = [u for u in (node, *node.users) if order[u] > order[release]]
                        if late:
                            detail = f"{late[0].name} reads it after the release"
                            index = int(item.args[1])  # type: ignore[arg-type]
                            yield Broken(module.graph, late[0], step.group, index, detail)


def _waits_for_group(opened: fx.Node) -> list[fx.Node]:
    return [u for u in opened.users if (s := step_of(u)) and s.kind is StepKind.GATHER_WAIT]


def _every_gather_is_released(program: Program) -> Iterator[Broken]:
    for module in program.directions:
        released = {release.args[0] for release, _ in steps(module.graph, StepKind.RELEASE)}
        if not released:
            continue  # releases are not placed yet
        for wait, step in steps(module.graph, StepKind.GATHER_WAIT):
            opened = awaited_group(wait)
            items = [item for w in _waits_for_group(opened) for item in w.users]
            escapes = any(u.op == "output" for n in aliases(items) for u in n.users)
            if opened not in released and not escapes:
                yield Broken(module.graph, wait, step.group, None, "it is never released")


def _what_the_host_holds_is_not_read(program: Program) -> Iterator[Broken]:
    """Nothing reads an activation after its copy to the host is issued, but what is returned; of
    what the host holds nothing is read in backward but by the copy back."""
    for module in program.directions:
        order = positions(module.graph)
        for issue, step in steps(module.graph, StepKind.OFFLOAD_ISSUE):
            for node in aliases(map(owner, copied_tensors(issue))):
                late = [u for u in node.users if order[u] > order[issue]]
                if late:
                    detail = f"{late[0].name} reads {node.name} after that"
                    yield Broken(module.graph, issue, step.group, None, detail)
        for issue, step in steps(module.graph, StepKind.RELOAD_ISSUE):
            for node in copied_tensors(issue):
                others = [user for user in node.users if user is not issue]
                if others:
                    detail = f"{others[0].name} reads {node.name} too"
                    yield Broken(module.graph, issue, step.group, None, detail)


def _waits_of_a_gather_stand_together(program: Program) -> Iterator[Broken]:
    for module in program.directions:
        nodes = list(module.graph.nodes)
        order = positions(module.graph)
        for issue, _ in steps(module.graph, StepKind.GATHER_ISSUE):
            places = [order[wait] for wait in waits_of(issue)]
            for node in nodes[min(places, default=0) : max(places, default=0)]:
                step = step_of(node)
                if step is None or step.kind is not StepKind.GATHER_WAIT:
                    detail = f"{node.name} stands between them"
                    yield Broken(module.graph, issue, _group_of(issue), None, detail)
                    break


def _trainable_groups_reduce_once(program: Program) -> Iterator[Broken]:
    for module in program.directions:
        for issue, step in steps(module.graph, StepKind.REDUCE_ISSUE):
            indices = issue.args[2]
            if list(indices) != sorted(set(indices)):  # type: ignore[arg-type]
                detail = f"packed as {indices}, not in registration order"
                yield Broken(module.graph, issue, step.group, None, detail)


def _one_mark_per_parameter(program: Program) -> Iterator[Broken]:
    if program.joint is not None and program.forward is None:
        return  # the captured form: passes/drop_duplicates.py and sum_gradients.py come first
    for module in program.directions:
        seen: set[tuple[bool, int, int]] = set()
        for mark in (*unshard_marks(module.graph), *reduce_marks(module.graph)):
            key = (is_unshard(mark.node), mark.group, mark.index)
            if key in seen and program.backward is not None:
                yield Broken(module.graph, mark.node, mark.group, mark.index, "a second mark")
            seen.add(key)


def _attributes_stay(program: Program) -> Iterator[Broken]:
    for module in program.graphs:
        for node in module.graph.find_nodes(op="get_attr"):
            if gets_something_else(node):
                yield Broken(module.graph, node, None, None, f"{node.target} was overwritten")


RULES = (
    Rule("GS301", "every mark names a known group and parameter", _marks_name_their_group),
    Rule("GS302", "every gradient's token is used", _gradients_reach_the_output),
    Rule("GS303", "no gathered parameter is saved for backward", _nothing_gathered_is_saved),
    Rule("GS304", "a parameter has one mark per direction", _one_mark_per_parameter),
    Rule("GS305", "everything is issued, awaited and released once", _everything_happens_once),
    Rule("GS306", "gathered memory is read between wait and release", _uses_lie_before_the_release),
    Rule("GS307", "every gather is released", _every_gather_is_released),
    Rule("GS308", "gradients are packed in registration order", _trainable_groups_reduce_once),
    Rule("GS311", "waits of one gather stand together", _waits_of_a_gather_stand_together),
    Rule("GS313", "what is offloaded has no other reader", _what_the_host_holds_is_not_read),
    Rule("GS312", "a constant or subgraph is what was captured", _attributes_stay),
)
