"""Communication steps go where the schedule says."""

from collections import defaultdict

from torch import fx

from graphshard.errors import VerifyError
from graphshard.ir import Program, compute_nodes, output_node, step_of
from graphshard.plan import Direction, Plan, Schedule, StepKind


def apply_plan(program: Program, plan: Plan) -> Program:
    """Reorder the nodes of each direction to the plan's steps.

    Before: naive placement. After: graph order is schedule order; the order of the compute ops
    is unchanged. Raises VerifyError if the plan does not fit the program.
    """
    for schedule in plan.schedules:
        module = program.forward if schedule.direction is Direction.FORWARD else program.backward
        assert module is not None
        _reorder(module.graph, schedule)
        module.recompile()
    return program


def _reorder(graph: fx.Graph, schedule: Schedule) -> None:
    compute = compute_nodes(graph)
    comm: dict[tuple[StepKind, int], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if (step := step_of(node)) is not None:
            comm[step.kind, step.group].append(node)
    order: list[fx.Node] = []
    for entry in schedule.steps:
        if entry.kind is StepKind.COMPUTE:
            order.extend(compute[entry.start : entry.stop])
        else:
            assert entry.group is not None
            order.extend(comm.pop((entry.kind, entry.group), ()))
    if comm or len({n for n in order if step_of(n) is None}) != len(compute):
        left = ", ".join(f"{kind} of group {group}" for kind, group in comm)
        raise VerifyError("GS310", f"the schedule leaves out {left or 'compute ops'}")
    output = output_node(graph)
    for node in order:
        output.prepend(node)
