"""The nouns of the graph side: a program, its groups, its marks and its communication steps.

A program starts with `graphshard::unshard` / `graphshard::reduce_grad` marks (see
`graphshard.graph.marks`) and ends with communication steps: `call_method` nodes on the run object
that the emitted code receives as its first argument. Identity rides on `node.meta`, written and
read only here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from graphshard.graph.marks import REDUCE_GRAD, UNSHARD
from graphshard.schedule.plan import Direction, GroupInfo, StepKind
from graphshard.schedule.steps import WAITS

_GROUP = "graphshard_group"
_STEP = "graphshard_step"
_ATTRIBUTE = "graphshard_attribute"


@dataclass(frozen=True, slots=True)
class Program:
    """One captured graph on its way through the passes.

    `joint` is the graph of both directions before the partition; `forward` and `backward` are
    set after it (under no_grad there is only `forward`, from the start). `num_outputs` counts
    the forward outputs that are not saved for backward.
    """

    name: str
    groups: tuple[GroupInfo, ...]
    num_outputs: int
    joint: fx.GraphModule | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        return tuple(g for g in (self.joint, self.forward, self.backward) if g is not None)

    @property
    def by_direction(self) -> dict[Direction, fx.GraphModule]:
        """The graphs that there are after the partition, forward first."""
        both = {Direction.FORWARD: self.forward, Direction.BACKWARD: self.backward}
        return {direction: module for direction, module in both.items() if module is not None}

    @property
    def directions(self) -> tuple[fx.GraphModule, ...]:
        return tuple(self.by_direction.values())

    def with_groups(self, groups: tuple[GroupInfo, ...]) -> Program:
        return replace(self, groups=groups)


def copied(program: Program) -> Program:
    """A program with graphs of its own; passes change graphs in place."""
    return replace(
        program,
        forward=None if program.forward is None else copy_of(program.forward),
        backward=None if program.backward is None else copy_of(program.backward),
    )


class GraphDraft(fx.GraphModule):
    """A module whose graph is still being changed, and its Python not written at each change."""

    def recompile(self) -> Any:
        return None


def copy_of(module: fx.GraphModule) -> GraphDraft:
    """A module with a graph of its own. `copy.deepcopy` would copy the calling convention too."""
    graph = fx.Graph()
    found: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    results, output = found
    graph.output(results).meta.update(output.meta)
    return GraphDraft(module, graph)


@dataclass(frozen=True, slots=True)
class Mark:
    """An `unshard` or `reduce_grad` node, read. `layout` is that of a gradient."""

    node: fx.Node
    group: int
    index: int
    layout: int = -1


@dataclass(frozen=True, slots=True)
class CommStep:
    """What a communication node does, and for which group.

    part: tells a step's nodes apart; a group is opened (`open`) before its `head`, and `wait`
    yields parameters by index (`head`) and one `item` for each that is used. params: where a group
    is split, the parameters that this step is about (see `graphshard.schedule.plan.Step`).
    """

    kind: StepKind
    group: int
    part: str = "head"
    params: tuple[int, ...] = ()


# -- identity ------------------------------------------------------------------------------


def set_anchor_group(placeholder: fx.Node, group: int) -> None:
    """Say that the graph input `placeholder` is the anchor of group `group`."""
    placeholder.meta[_GROUP] = group


def anchor_group(node: fx.Node) -> int | None:
    group = node.meta.get(_GROUP)
    return None if group is None else int(group)


def set_step(node: fx.Node, step: CommStep) -> fx.Node:
    node.meta[_STEP] = step
    return node


def step_of(node: fx.Node) -> CommStep | None:
    return node.meta.get(_STEP)


# -- marks ---------------------------------------------------------------------------------


def unshard_marks(graph: fx.Graph) -> list[Mark]:
    """All `unshard` marks in graph order."""
    return [_mark(n, n.args[0], n.args[4]) for n in graph.nodes if is_unshard(n)]


def reduce_marks(graph: fx.Graph) -> list[Mark]:
    """All `reduce_grad` marks in graph order."""
    return [_mark(n, n.args[1], *n.args[2:]) for n in graph.nodes if is_reduce(n)]


def is_unshard(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is UNSHARD


def is_reduce(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is REDUCE_GRAD


def anchor_of(mark: Mark) -> fx.Node:
    """The placeholder that names the mark's group."""
    return _origin(mark.node.args[0 if is_unshard(mark.node) else 1])


def _mark(node: fx.Node, anchor: Any, index: Any, layout: Any = -1) -> Mark:
    group = anchor_group(_origin(anchor))
    return Mark(node, -1 if group is None else group, int(index), int(layout))


def _origin(anchor: Any) -> fx.Node:
    # AOTAutograd may put a detach or alias between an input and its use.
    while anchor.op == "call_function" and is_view(anchor):
        anchor = anchor.args[0]
    return anchor  # type: ignore[no-any-return]


def anchor_places(module: fx.GraphModule) -> tuple[int, ...]:
    """The places of the anchors that the program opens, in order, among its inputs after the run
    object."""
    inputs = module.graph.find_nodes(op="placeholder")
    opens = (n for n in module.graph.nodes if (step := step_of(n)) and step.part == "open")
    return tuple(dict.fromkeys(inputs.index(_origin(n.args[1])) - 1 for n in opens))


# -- aliases -------------------------------------------------------------------------------


def is_view(node: fx.Node) -> bool:
    """The node's output shares memory with its first argument (an ATen view or alias op)."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and _views(target)


@cache
def _views(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype to which `node` casts, if a dtype cast is all it does."""
    if node.op != "call_function" or node.target not in CASTS:
        return None
    if node.target is CASTS[1]:
        return node.args[1]  # type: ignore[return-value]
    if set(node.kwargs) != {"dtype"}:
        return None
    return node.kwargs["dtype"]  # type: ignore[return-value]


def aliases(roots: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`roots` and every node that shares memory with one of them, in discovery order."""
    return _reached(roots, _shares_memory)


def derived(roots: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`roots`, their views and dtype casts, and views of those."""
    return _reached(
        roots, lambda user, node: _shares_memory(user, node) or cast_dtype(user) is not None
    )


def _shares_memory(user: fx.Node, node: fx.Node) -> bool:
    """`user` is a view of `node`, or one of the views of which `node` is the list (a split)."""
    return is_view(user) or (user.target is operator.getitem and is_view(node))


def _reached(
    roots: Iterable[fx.Node], follows: Callable[[fx.Node, fx.Node], bool]
) -> dict[fx.Node, None]:
    found = dict.fromkeys(roots)
    queue = list(found)
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user not in found and user.args and user.args[0] is node and follows(user, node):
                found[user] = None
                queue.append(user)
    return found


# -- order ---------------------------------------------------------------------------------


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute, in order: neither inputs, output nor communication."""
    outside = ("placeholder", "output", "get_attr")
    return [n for n in graph.nodes if n.op not in outside and step_of(n) is None]


def steps(graph: fx.Graph, kind: StepKind) -> Iterator[tuple[fx.Node, CommStep]]:
    """Head nodes of one kind of communication step, in graph order."""
    for node in graph.nodes:
        step = step_of(node)
        if step is not None and step.kind is kind and step.part == "head":
            yield node, step


def gathered_groups(issue: fx.Node) -> list[fx.Node]:
    """The opened groups that travel in the all-gather `issue`."""
    return list(issue.args[1:])  # type: ignore[arg-type]


def awaited_group(wait: fx.Node) -> fx.Node:
    """The opened group whose parameters the gather wait `wait` yields."""
    return wait.args[1]  # type: ignore[return-value]


def waits_of(issue: fx.Node) -> list[fx.Node]:
    """The waits for the collective or the copy `issue`."""
    return [u for u in issue.users if (s := step_of(u)) and s.kind in WAITS]


def run_input(graph: fx.Graph) -> fx.Node:
    """The run object, a scheduled graph's first input."""
    first: fx.Node = next(iter(graph.nodes))
    return first


def copied_tensors(issue: fx.Node) -> list[fx.Node]:
    """What the copy to or from the host `issue` copies."""
    return list(issue.args[2])  # type: ignore[arg-type]


def output_node(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="output")[0]  # type: ignore[no-any-return]


def is_tangent(node: fx.Node) -> bool:
    """An input of backward that is (part of) the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def window(graph: fx.Graph, node: fx.Node, radius: int = 5) -> str:
    """The ten nodes around `node`, one a line, the node itself marked."""
    nodes = list(graph.nodes)
    at = nodes.index(node)
    rows = nodes[max(0, at - radius) : at + radius]
    return "\n".join(f"{'>' if n is node else ' '} {n.format_node()}" for n in rows)


def attribute_of(node: fx.Node) -> Any:
    """What a `get_attr` node gets: a tensor, or the body of a higher-order op."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def adopt(module: fx.GraphModule, value: Any, wanted: str) -> str:
    """Make `value` an attribute of `module`; its name, `wanted` or like it. Overwrites nothing."""
    wanted = wanted.replace(".", "_")
    name = wanted
    for number in itertools.count(1):
        if not hasattr(module, name):
            setattr(module, name, value)
        if getattr(module, name) is value:
            break
        name = f"{wanted}_{number}"
    return name


def note_attributes(graph: fx.Graph) -> None:
    """Write down what each `get_attr` node gets, where that is not known yet.

    So the verifier sees when a node gets something else later on (GS312).
    """
    for node in graph.find_nodes(op="get_attr"):
        node.meta.setdefault(_ATTRIBUTE, attribute_of(node))


def gets_something_else(node: fx.Node) -> bool:
    """`node`, a `get_attr`, gets another value than when it was noted."""
    return _ATTRIBUTE in node.meta and node.meta[_ATTRIBUTE] is not attribute_of(node)


def identifier(text: str) -> str:
    """A Python identifier that still reads like the FQN `text`."""
    name = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return f"_{name}" if name[:1].isdigit() else name or "root"
