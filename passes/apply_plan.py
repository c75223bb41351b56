"""Communication steps go where the schedule says."""

from collections import defaultdict
from itertools import chain

from torch import fx

from graphshard.errors import VerifyError
from graphshard.graph.program import Program, compute_nodes, output_node, step_of, steps
from graphshard.schedule.plan import Direction, Plan, Reshard, Schedule, StepKind


def apply_plan(program: Program, plan: Plan) -> Program:
    """Reorder the nodes of each direction to the plan's steps.

    Before: naive placement of the plan's collectives (see `regroup`). After: graph order is
    schedule order; the order of the compute ops is unchanged; releases of forward know what the
    plan decided to keep. Raises VerifyError if the plan does not fit the program.
    """
    modules = program.by_direction
    if [s.direction for s in plan.schedules] != list(modules):
        raise VerifyError("GS310", f"the plan has other directions than {', '.join(modules)}")
    for schedule in plan.schedules:
        module = modules[schedule.direction]
        _reorder(module.graph, schedule)
        _keep(module.graph, program, schedule)
    return program


def _keep(graph: fx.Graph, program: Program, schedule: Schedule) -> None:
    """Hand the plan's decisions to the releases."""
    releases = list(schedule.of_kind(StepKind.RELEASE))
    kept = {s.group for s in releases if s.kept}
    on_node = {s.group for s in releases if s.on_node}
    for node, step in steps(graph, StepKind.RELEASE):
        info = program.groups[step.group]
        decided = info.resharded_by
        if node.target == "release_for_backward" and decided is not Reshard.FSDP2:
            final = {"final": True} if decided is Reshard.AUTO else {}
            held = {"on_node": True} if step.group in on_node else {}
            node.kwargs = {"keep": step.group in kept, **held, **final}
        elif schedule.direction is Direction.BACKWARD and info.between_micro_steps:
            node.kwargs = {"between_micro_steps": True}
        elif schedule.direction is Direction.FORWARD and decided is Reshard.AUTO:
            node.kwargs = {"final": True}


def _is_not_open(node: fx.Node) -> bool:
    step = step_of(node)
    return step is None or step.part != "open"


def _reorder(graph: fx.Graph, schedule: Schedule) -> None:
    compute = compute_nodes(graph)
    comm: dict[tuple[StepKind, int | None, tuple[int, ...]], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if (step := step_of(node)) is not None:
            comm[step.kind, step.group, step.params].append(node)
    order: list[fx.Node] = []
    for entry in schedule.steps:
        if entry.kind is StepKind.COMPUTE:
            order.extend(compute[entry.start : entry.stop])
            continue
        found = [comm.pop((entry.kind, group, entry.params), []) for group in entry.groups]
        if not all(found):
            raise VerifyError("GS310", f"the graph has no {entry.kind} of group {entry.group} left")
        # Every group of a merged gather is opened before the first of them carries the issue.
        order.extend(sorted(chain.from_iterable(found), key=_is_not_open))
    if comm:
        left = ", ".join(f"{kind} of group {group}" for kind, group, _ in comm)
        raise VerifyError("GS310", f"the schedule leaves out {left}")
    covered = [i for s in schedule.of_kind(StepKind.COMPUTE) for i in range(s.start, s.stop)]
    if set(range(len(compute))) - set(covered):
        raise VerifyError("GS310", "the schedule leaves out compute ops")
    if covered != list(range(len(compute))):
        raise VerifyError("GS310", f"the graph has {len(compute)} compute ops, the schedule others")
    output = output_node(graph)
    for node in order:
        output.prepend(node)
