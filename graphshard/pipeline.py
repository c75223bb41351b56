"""Runs passes and checks every rule after each of them - the only place that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from graphshard.cost.machine import Machine
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
from graphshard.plan import Direction, Plan, Schedule, StepKind
from graphshard.planner.one_ahead import one_ahead
from graphshard.planner.outline import GroupUse, Outline, Ready
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import Problem
from graphshard.pricing import price, recompute_units
from graphshard.recompute import Unit
from graphshard.verify import verify

logger = logging.getLogger(__name__)

Pass = Callable[[Program], Program]


def run_passes(program: Program, passes: Iterable[Pass]) -> Program:
    """`program` after `passes`. Raises VerifyError as soon as a rule is broken."""
    for transform in passes:
        program = transform(program)
        verify(program, after=transform.__name__)
        logger.debug("%s: %s done", program.name, transform.__name__)
    return program


def run_captured(program: Program) -> Program:
    """The passes on the captured form (joint graph, or forward graph under no_grad)."""
    return run_passes(program, CAPTURED)


@dataclass(frozen=True, slots=True)
class Order:
    """What a plan with the cost model needs to know: settings of the groups, machine, budget.

    budget_bytes: None for the peak of FSDP2's own schedule.
    """

    settings: tuple[GroupSettings, ...]
    machine: Machine
    budget_bytes: int | None = None


def schedule(program: Program, order: Order | None = None) -> tuple[Program, Plan]:
    """A captured program in the order of its plan, and that plan.

    Without an order each gather is issued one group ahead. Raises InfeasibleBudget if no schedule
    fits the order's budget.
    """
    placed = place(program)
    if order is None:
        plan = plan_without_costs(placed)
    else:
        plan = plan_with_costs(placed, pose(placed, order))
    return apply(placed, plan), plan


def place(program: Program) -> Program:
    """Naive placement: every communication step stands where it is needed."""
    return run_passes(program, PLACEMENT)


def pose(program: Program, order: Order) -> Problem:
    """The problem that a placed program poses, as it was partitioned."""
    return price(program, _outlines(program), order.settings, order.machine, order.budget_bytes)


def choose_recompute(program: Program, order: Order) -> tuple[Unit, ...]:
    """What backward should compute again, so that a budget is kept or gathers are saved.

    Raises InfeasibleBudget if no choice fits the order's budget.
    """
    outlines = _outlines(program)
    found = recompute_units(program, outlines, order.machine)
    if not found:
        return ()
    problem = price(
        program, outlines, order.settings, order.machine, order.budget_bytes, recompute=True
    )
    return tuple(found[index] for index in plan_step(problem).recompute)


def plan_without_costs(program: Program) -> Plan:
    """Each gather of a placed program one group ahead."""
    return _plan_of(program, [one_ahead(o) for o in _outlines(program).values()])


def plan_with_costs(program: Program, problem: Problem, baseline: Problem | None = None) -> Plan:
    """The best plan that the planner finds. Raises InfeasibleBudget if none fits the budget.

    baseline: the problem without recomputation, if `program` has some: what FSDP2 would run.
    """
    planned = plan_step(problem, baseline)
    plan = _plan_of(program, planned.schedules)
    groups = tuple(
        replace(info, keep_is_planned=group.reshard is None)
        for info, group in zip(plan.groups, problem.groups, strict=True)
    )
    return replace(plan, groups=groups, estimate=planned.estimate, reasons=planned.reasons)


def apply(program: Program, plan: Plan) -> Program:
    """A placed program in the plan's order."""
    program = apply_plan(program.with_groups(plan.groups), plan)
    verify(program, after=apply_plan.__name__)
    return program


def _plan_of(program: Program, schedules: Sequence[Schedule]) -> Plan:
    forward, *backward = schedules
    return Plan(
        name=program.name,
        torch_version=torch.__version__.split("+")[0],
        groups=program.groups,
        forward=forward,
        backward=backward[0] if backward else None,
    )


def _outlines(program: Program) -> dict[Direction, Outline]:
    modules = {Direction.FORWARD: program.forward, Direction.BACKWARD: program.backward}
    return {
        direction: outline(program, module.graph, direction)
        for direction, module in modules.items()
        if module is not None
    }


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
    uses = []
    for wait, step in steps(graph, StepKind.GATHER_WAIT):
        readers = {u for n in aliases(wait.users) for u in (n, *n.users) if u in ops}
        last = max((order[r] for r in readers), default=order[wait])
        ends = before[last] if step.group in released else None
        uses.append(GroupUse(step.group, before[order[wait]], ends))
    reductions = tuple(
        Ready(step.group, before[order[issue]] - 1, min(before[order[g]] for g in grads))
        for issue, step in steps(graph, StepKind.REDUCE_ISSUE)
        if (grads := issue.all_input_nodes[1:])
    )
    return Outline(direction, len(compute), tuple(uses), reductions, _kept(program))


def _kept(program: Program) -> frozenset[int]:
    """Groups that FSDP2's settings keep gathered until backward, if backward needs them."""
    if program.backward is None:
        return frozenset()
    needed = {step.group for _, step in steps(program.backward.graph, StepKind.GATHER_WAIT)}
    return frozenset(g.id for g in program.groups if not g.reshard_after_forward and g.id in needed)
