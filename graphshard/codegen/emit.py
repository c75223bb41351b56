"""From a scheduled program to callables: one generated Python function per direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

from graphshard.errors import CaptureError
from graphshard.graph.program import copy_of, output_node, run_input, step_of
from graphshard.schedule.plan import Schedule, Step, StepKind


def with_run_input(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` whose first input is the run object; the original stays as it is."""
    clone = copy_of(module)
    first = next(iter(clone.graph.nodes))
    with clone.graph.inserting_before(first):
        clone.graph.placeholder("run")
    return clone


def check_inputs(module: fx.GraphModule, given: fx.GraphModule) -> None:
    """given: the graph for which AOTAutograd wants code now; its inputs have to be `module`'s.

    Raises CaptureError otherwise.
    """
    wanted, have = _input_names(given), _input_names(module)[1:]
    if wanted != have:
        raise CaptureError("GS202", f"AOTAutograd changed the inputs: {wanted} {have}")


def emit(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The boxed callable of one direction."""
    module.graph.set_codegen(_BoxedCodeGen())
    fx.GraphModule.recompile(module)  # a lazy graph module does not do it by itself
    return module.forward


def code_of(module: fx.GraphModule | None) -> str:
    """The Python of one direction, readable, with group names. Passes change graphs, not code."""
    if module is None:
        return ""
    fx.GraphModule.recompile(module)  # a lazy graph module does not do it by itself
    return str(module.code)


def with_marks(
    module: fx.GraphModule, schedule: Schedule, cuts: frozenset[int]
) -> tuple[fx.GraphModule, tuple[Step, ...]]:
    """A copy that calls `run.mark(i)` before segment i and at its end, and the segments.

    A segment is a communication step of the schedule that `module` is in, or compute up to the
    next one or the next of `cuts`.
    """
    clone = copy_of(module)
    run = run_input(clone.graph)
    segments = list(_segments(clone.graph, schedule, cuts))
    for index, (node, _) in enumerate([*segments, (output_node(clone.graph), None)]):
        with clone.graph.inserting_before(node):
            clone.graph.call_method("mark", (run, index))
    return clone, tuple(step for _, step in segments)


def _segments(
    graph: fx.Graph, schedule: Schedule, cuts: frozenset[int]
) -> Iterator[tuple[fx.Node, Step]]:
    """First node of each segment, with what it stands for."""
    planned = {(s.kind, g, s.params): s for s in schedule.steps for g in s.groups}
    first: fx.Node | None = None
    step = Step(StepKind.COMPUTE)
    op = 0
    for node in graph.nodes:
        found = step_of(node)
        if node.op in ("placeholder", "get_attr", "output") or (found and found.part == "open"):
            continue
        if found is None:
            ahead = Step(StepKind.COMPUTE, start=op, stop=op + 1)
            goes_on = step.kind is StepKind.COMPUTE and op not in cuts
            op += 1
        else:
            ahead = planned[found.kind, found.group, found.params]
            goes_on = step == ahead
        if first is not None and goes_on:
            step = ahead if step == ahead else replace(step, stop=ahead.stop)
            continue
        if first is not None:
            yield first, step
        first, step = node, ahead
    if first is not None:
        yield first, step


def _input_names(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if n.op == "placeholder"]
