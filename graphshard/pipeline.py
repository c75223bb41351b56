"""Runs passes and checks every rule after each of them - the only place that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from graphshard import plan_cache
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
from graphshard.pricing import price
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
    """What a plan with the cost model needs to know: settings of the groups, machine, budget."""

    settings: tuple[GroupSettings, ...]
    machine: Machine
    budget_bytes: int


def schedule(
    program: Program, order: Order | None = None, agree: Callable[[Plan], Plan] | None = None
) -> tuple[Program, Plan]:
    """Naive placement, a plan, and the program in the plan's order.

    Without an order each gather is issued one group ahead. agree: what all ranks run in place of
    this rank's plan. Raises InfeasibleBudget if no schedule fits the order's budget, and what
    `agree` raises.
    """
    program = run_passes(program, PLACEMENT)
    if order is None:
        plan = _plan(program)
    else:
        program, plan = _best_plan(program, order)
    plan = plan if agree is None else agree(plan)
    program = apply_plan(program, plan)
    verify(program, after=apply_plan.__name__)
    return program, plan


def _plan(program: Program) -> Plan:
    schedules: dict[Direction, Schedule] = {}
    for direction, module in (
        (Direction.FORWARD, program.forward),
        (Direction.BACKWARD, program.backward),
    ):
        if module is not None:
            schedules[direction] = one_ahead(outline(program, module.graph, direction))
    return Plan(
        name=program.name,
        torch_version=_torch_version(),
        groups=program.groups,
        forward=schedules[Direction.FORWARD],
        backward=schedules.get(Direction.BACKWARD),
    )


def _best_plan(program: Program, order: Order) -> tuple[Program, Plan]:
    outlines = {
        direction: outline(program, module.graph, direction)
        for direction, module in (
            (Direction.FORWARD, program.forward),
            (Direction.BACKWARD, program.backward),
        )
        if module is not None
    }
    problem = price(program, outlines, order.settings, order.machine, order.budget_bytes)
    groups = tuple(
        replace(group, keep_is_planned=order.settings[group.id].reshard is None)
        for group in program.groups
    )
    program = program.with_groups(groups)
    key = plan_cache.key_of(problem, groups, _torch_version())
    plan = plan_cache.load(key, program.name)
    if plan is None:
        plan = _searched(program, problem)
        plan_cache.save(key, plan)
    return program, plan


def _searched(program: Program, problem: Problem) -> Plan:
    planned = plan_step(problem)
    forward, *backward = planned.schedules
    return Plan(
        name=program.name,
        torch_version=_torch_version(),
        groups=program.groups,
        forward=forward,
        backward=backward[0] if backward else None,
        estimate=planned.estimate,
    )


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
