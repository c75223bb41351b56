"""Runs passes and checks every rule after each of them - the only place that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from graphshard import artifacts, plan_cache
from graphshard.cost.machine import Machine
from graphshard.errors import InfeasibleBudget
from graphshard.fsdp2.settings import GroupSettings
from graphshard.ir import (
    Program,
    aliases,
    compute_nodes,
    positions,
    steps,
)
from graphshard.passes import CAPTURED, PLACEMENT
from graphshard.passes.apply_plan import apply_plan
from graphshard.passes.regroup import regroup
from graphshard.plan import Direction, Plan, Reshard, Schedule, StepKind
from graphshard.planner.one_ahead import one_ahead
from graphshard.planner.outline import GroupUse, Outline, ParamUse, Ready
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import Problem
from graphshard.pricing import Freedom, op_ends_us, price
from graphshard.recompute import Unit, offered, units
from graphshard.verify import verify

logger = logging.getLogger(__name__)

# Compute is predicted to about a tenth, so a small gain that costs compute is no gain for sure.
WORTHWHILE = 0.05

Pass = Callable[[Program], Program]


def run_passes(program: Program, passes: Iterable[Pass]) -> Program:
    """`program` after `passes`. Raises VerifyError as soon as a rule is broken."""
    for transform in passes:
        program = _checked(transform(program), transform.__name__)
    return program


def _checked(program: Program, name: str) -> Program:
    """`program`, as pass `name` left it, if it breaks no rule."""
    verify(program, after=name)
    if program.joint is not None:
        artifacts.graph_after(name, program.joint)
    for direction, module in program.by_direction.items():
        artifacts.graph_after(f"{name}_{direction}", module)
    logger.debug("%s: %s done", program.name, name)
    return program


def run_captured(program: Program) -> Program:
    """The passes on the captured form (joint graph, or forward graph under no_grad)."""
    return run_passes(program, CAPTURED)


@dataclass(frozen=True, slots=True)
class Order:
    """What a plan with the cost model needs to know."""

    settings: tuple[GroupSettings, ...]
    machine: Machine
    freedom: Freedom


def schedule(program: Program, order: Order | None = None) -> tuple[Program, Plan]:
    """A captured program in the order of its plan, and that plan.

    Without an order each gather is issued one group ahead. Raises InfeasibleBudget if no schedule
    fits the order's budget.
    """
    placed = place(program)
    if order is None:
        plan = plan_without_costs(placed)
    else:
        plan = plan_with_costs(placed, pose(placed, order), order.freedom.reshard)
    return apply(placed, plan), plan


def place(program: Program) -> Program:
    """Naive placement: every communication step stands where it is needed."""
    return run_passes(program, PLACEMENT)


def pose(program: Program, order: Order) -> Problem:
    """The problem that a placed program poses, as it was partitioned."""
    return price(program, _outlines(program), order.settings, order.machine, order.freedom)


def choose_recompute(program: Program, order: Order, problem: Problem) -> tuple[Unit, ...]:
    """What backward should compute again: what the budget needs, or what gains WORTHWHILE.

    problem: what `program` poses. Raises InfeasibleBudget if no choice fits the order's budget.
    """
    if not order.freedom.recompute or program.forward is None or program.backward is None:
        return ()
    graph, reshard = program.forward.graph, order.freedom.reshard
    uses = outline(program, graph, Direction.FORWARD)
    found = units(program, uses, op_ends_us(graph, order.machine))
    if not found:
        return ()
    chosen = plan_with_costs(program, offered(problem, program, found), reshard)
    without = _or_none(program, problem, reshard)
    if without is not None and _step_us(chosen) > (1 - WORTHWHILE) * _step_us(without):
        return ()
    return tuple(unit for unit in found if program.groups[unit.group].fqn in chosen.recompute)


def _or_none(program: Program, problem: Problem, reshard: Reshard) -> Plan | None:
    """The plan, or None if nothing fits the budget."""
    try:
        return plan_with_costs(program, problem, reshard)
    except InfeasibleBudget:
        return None


def _step_us(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_us


def plan_without_costs(program: Program) -> Plan:
    """Each gather of a placed program one group ahead."""
    return _plan_of(program, [one_ahead(o) for o in _outlines(program).values()])


def plan_with_costs(
    program: Program, problem: Problem, reshard: Reshard, baseline: Problem | None = None
) -> Plan:
    """The best plan that the planner finds. Raises InfeasibleBudget if none fits the budget.

    baseline: the problem without recomputation, if `program` has some: what FSDP2 would run.
    """
    groups = tuple(
        replace(info, resharded_by=reshard if group.reshard is None else Reshard.FSDP2)
        for info, group in zip(program.groups, problem.groups, strict=True)
    )
    key = plan_cache.key_of(problem, baseline, groups, _torch_version())
    plan = plan_cache.load(key, program.name)
    if plan is None:
        planned = plan_step(problem, baseline)
        groups = tuple(
            replace(info, between_micro_steps=info.id in planned.across) for info in groups
        )
        plan = _plan_of(program.with_groups(groups), planned.schedules)
        names = tuple(problem.recompute[index].name for index in planned.recompute)
        plan = replace(
            plan,
            estimate=planned.estimate,
            recompute=names,
            reasons=planned.reasons,
            forecasts=planned.forecasts,
            fsdp2=planned.fsdp2,
        )
        plan_cache.save(key, plan)
    return plan


def apply(program: Program, plan: Plan) -> Program:
    """A placed program in the plan's order."""
    program = program.with_groups(plan.groups)
    for follow in (regroup, apply_plan):
        program = _checked(follow(program, plan), follow.__name__)
    return program


def _plan_of(program: Program, schedules: Sequence[Schedule]) -> Plan:
    forward, *backward = schedules
    return Plan(
        name=program.name,
        torch_version=_torch_version(),
        groups=program.groups,
        forward=forward,
        backward=backward[0] if backward else None,
    )


def _outlines(program: Program) -> dict[Direction, Outline]:
    return {
        direction: outline(program, module.graph, direction)
        for direction, module in program.by_direction.items()
    }


def _torch_version() -> str:
    return torch.__version__.split("+")[0]


def outline(program: Program, graph: torch.fx.Graph, direction: Direction) -> Outline:
    """What the planner may know of `graph`, which has its steps placed naively."""
    order = positions(graph)
    compute = compute_nodes(graph)
    # Position in graph order -> number of compute ops before it.
    before = {}
    ops = set(compute)
    count = 0
    for node in graph.nodes:
        before[order[node]] = count
        count += node in ops
    released = {step.group for _, step in steps(graph, StepKind.RELEASE)}
    uses, params = [], []
    for wait, step in steps(graph, StepKind.GATHER_WAIT):
        group, found = step.group, []
        for item in wait.users:
            readers = {u for n in aliases([item]) for u in (n, *n.users) if u in ops}
            reads = sorted(before[order[reader]] for reader in readers) or [before[order[wait]]]
            last = reads[-1] if group in released else None
            found.append(ParamUse(group, int(item.args[1]), reads[0], last))  # type: ignore[arg-type]
        lasts = [use.last for use in found if use.last is not None]
        uses.append(GroupUse(group, before[order[wait]], max(lasts, default=None)))
        params += found
    reductions = tuple(
        Ready(step.group, before[order[issue]] - 1, _comes(issue, before, order))
        for issue, step in steps(graph, StepKind.REDUCE_ISSUE)
        if issue.all_input_nodes[1:]
    )
    return Outline(direction, len(compute), tuple(uses), reductions, _kept(program), tuple(params))


def _comes(
    issue: torch.fx.Node, before: dict[int, int], order: dict[torch.fx.Node, int]
) -> tuple[tuple[int, int], ...]:
    """The parameters that `issue` reduces, and the compute op that each gradient comes with."""
    _, grads, indices = issue.args
    pairs = zip(indices, grads, strict=True)  # type: ignore[arg-type]
    return tuple((int(i), before[order[g]]) for i, g in pairs)


def _kept(program: Program) -> frozenset[int]:
    """Groups that FSDP2's settings keep gathered until backward, if backward needs them."""
    if program.backward is None:
        return frozenset()
    needed = {step.group for _, step in steps(program.backward.graph, StepKind.GATHER_WAIT)}
    return frozenset(g.id for g in program.groups if not g.reshard_after_forward and g.id in needed)
