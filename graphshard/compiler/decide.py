"""What a captured graph is planned to be: with which activations computed again, in which order.

In come partitions (`graphshard.compiler.partition`) and `PlanningInputs` (settings, machine,
policy). Out comes a `PlannedPartition`: the two graphs as they are cut in the end, the problem that
they pose, and its plan. A run and a plan made offline differ only in where the inputs come from.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from torch import fx

from graphshard.codegen.emit import with_run_input
from graphshard.compiler.partition import (
    Cut,
    Found,
    JointGraph,
    Partition,
    cut_in_two,
    name_anchors,
    released,
)
from graphshard.compiler.planning import (
    FirstPlans,
    PlanningInputs,
    Posed,
    first_plans,
    is_worth,
    place,
    plan_with_costs,
    problem_of,
    run_captured,
    saying_what_is_held,
)
from graphshard.errors import InfeasibleBudget
from graphshard.graph.program import Program, output_node
from graphshard.planner.problem import Problem
from graphshard.pricing.op_costs import GraphCosts, graph_costs
from graphshard.pricing.recompute import activation_of, chosen_units
from graphshard.pricing.recompute_reasons import recompute_reasons
from graphshard.schedule.plan import Plan, PricedOn, Recomputed

Parts = TypeVar("Parts")
# So often what is computed again is chosen anew where it frees less than it promised.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Decided(Generic[Parts]):
    """problem: what the placed program of `parts` poses; `plan` is its answer."""

    parts: Parts
    problem: Problem
    plan: Plan


PlannedPartition: TypeAlias = Decided[Partition]
# From what is computed again to what the graph costs then.
Again: TypeAlias = Callable[[Recomputed], tuple[Parts, GraphCosts]]


def plan_partition(
    joint_graph: JointGraph,
    planning: PlanningInputs,
    settle: Callable[[Recomputed], Recomputed],
) -> PlannedPartition:
    """The plan of a captured graph, whose joint graph is used up. Raises InfeasibleBudget.

    settle: from what this rank would compute again to what all ranks do.
    """
    other = released(joint_graph) if planning.policy.replaces_checkpoints else None
    split = partial(cut_in_two, recompute=planning.policy.recompute, fused=planning.fused)
    own, free = split(joint_graph), None if other is None else split(other)
    planned = decide(own, free, planning)
    chosen = settle(planned.plan.recompute)
    if chosen == planned.plan.recompute:
        return planned
    return decide(own, free, replace(planning, recompute_as=chosen))


def plan_inference(
    name: str, gm: fx.GraphModule, found: Found, planning: PlanningInputs
) -> PlannedPartition:
    """The plan of a graph under no_grad. Raises InfeasibleBudget."""
    name_anchors(gm, found)
    outputs = len(output_node(gm.graph).args[0])  # type: ignore[arg-type]
    program = run_captured(Program(name, found.infos, outputs, forward=gm))
    placed = place(replace(program, forward=with_run_input(gm)))
    parts = Partition(gm, None, placed)
    return decide(Cut(parts, lambda chosen: parts), None, planning)


def decide(own: Cut, free: Cut | None, planning: PlanningInputs) -> PlannedPartition:
    """The better of two plans: with what the user's checkpoints say, and, if that may be replaced
    (`free`), without. Raises InfeasibleBudget if no schedule fits the policy's budget.
    """
    posed = pose(own, planning)
    if free is None:
        return decided_cut(own, posed, planning)
    agreed = planning.recompute_as
    if agreed is not None and not agreed.replaced:
        return decided_cut(own, posed, planning)
    freely = pose(free, planning, posed.problem)
    if agreed is not None:
        return decided_cut(free, freely, planning)
    return better_of(
        partial(decided_cut, own, posed, planning), partial(decided_cut, free, freely, planning)
    )


def better_of(
    own: Callable[[], Decided[Parts]], free: Callable[[], Decided[Parts]]
) -> Decided[Parts]:
    """What `free` finds where that is worth it, or where nothing else fits. Raises InfeasibleBudget
    if neither fits: the one that needs less."""
    try:
        theirs = own()
    except InfeasibleBudget as error:
        try:
            return free()
        except InfeasibleBudget as other:
            raise min(error, other, key=lambda one: one.shortage.least_bytes) from None
    try:
        ours = free()
    except InfeasibleBudget:
        return theirs
    return ours if is_worth(ours.plan, theirs.plan) else theirs


def pose(cut: Cut, planning: PlanningInputs, baseline: Problem | None = None) -> Posed:
    """baseline: see Posed."""
    costs = graph_costs_of(cut.parts, planning, recompute=planning.policy.recompute)
    return Posed(costs, problem_of(costs, planning), cut.checkpoints, baseline)


def decided_cut(cut: Cut, posed: Posed, planning: PlanningInputs) -> PlannedPartition:
    """See `decided`. posed: by `cut`."""

    def again(chosen: Recomputed) -> tuple[Partition, GraphCosts]:
        parts = cut.again(chosen_units(posed.costs.units, posed.costs.groups, chosen))
        return parts, graph_costs_of(parts, planning, recompute=False)

    return decided(cut.parts, again, posed, planning)


def graph_costs_of(parts: Partition, planning: PlanningInputs, *, recompute: bool) -> GraphCosts:
    return graph_costs(
        parts.placed,
        planning.machine,
        recompute=recompute,
        fused=planning.fused,
        parts=planning.in_parts,
    )


def decided(
    parts: Parts, again: Again[Parts], posed: Posed, planning: PlanningInputs
) -> Decided[Parts]:
    """The plan of `parts`, which poses `posed`, or of what `again` makes of it where something is
    to be computed again.

    The second is planned anew, since the graph is another one then; what it is really worth counts.
    Raises InfeasibleBudget if no schedule fits the policy's budget.
    """
    first = _first(posed, planning)
    plain = None
    if first.without is not None:
        plain = Decided(parts, posed.problem, first.without)
    if first.recompute.changes_graph:
        found = _again_within(again, posed, planning, first)
        with saying_what_is_held(posed.costs):
            plain = _better(found, plain, is_agreed=first.recompute == planning.recompute_as)
    assert plain is not None
    return replace(plain, plan=explained(plain.plan, posed, planning))


def _first(posed: Posed, planning: PlanningInputs) -> FirstPlans:
    """See `first_plans`; where nothing fits, everything is to be computed again: what that graph
    really needs is the least that can be had, and what an error has to say."""
    try:
        return first_plans(posed, planning)
    except InfeasibleBudget as error:
        everything = _everything(posed)
        is_free = planning.policy.recompute and planning.recompute_as is None
        if not everything.activations or not is_free:
            raise
        return FirstPlans(everything, error.shortage.budget_bytes, None)


def explained(plan: Plan, posed: Posed, planning: PlanningInputs) -> Plan:
    """`plan` of what `posed` says, with what it was made from and why it computes again what it
    does."""
    again = recompute_reasons(posed.costs.units, posed.costs.groups, plan.recompute)
    return replace(plan, reasons=(*plan.reasons, *again), priced_on=priced_on(planning))


def _again_within(
    again: Again[Parts], posed: Posed, planning: PlanningInputs, first: FirstPlans
) -> Decided[Parts] | InfeasibleBudget:
    """What comes of computing again what `first` says.

    What that frees was a promise, of a graph that is another one now. Where it does not fit, the
    choice is made again for as much less, and at last everything is computed again.
    """
    chosen, limit_bytes, everything = first.recompute, first.budget_bytes, _everything(posed)
    found = _repeating(again, posed, planning, first, chosen)
    for tries_left in reversed(range(TRIES)):
        if isinstance(found, Decided) or chosen in (planning.recompute_as, everything):
            break
        limit_bytes -= found.shortage.least_bytes - first.budget_bytes
        other = everything
        if tries_left:
            other = _within(posed, planning, limit_bytes)
        if other != chosen:
            chosen = other
            found = _repeating(again, posed, planning, first, chosen)
    return found


def _within(posed: Posed, planning: PlanningInputs, limit_bytes: int) -> Recomputed:
    """What to compute again for a budget that is not the user's; all where nothing fits that."""
    less = replace(posed, problem=replace(posed.problem, budget_bytes=limit_bytes))
    try:
        return first_plans(less, planning).recompute
    except InfeasibleBudget:
        return _everything(posed)


def _everything(posed: Posed) -> Recomputed:
    found = (activation_of(unit, posed.costs.groups) for unit in posed.costs.units)
    return Recomputed(tuple(found), posed.checkpoints, posed.replaced)


def _better(
    repeating: Decided[Parts] | InfeasibleBudget, plain: Decided[Parts] | None, *, is_agreed: bool
) -> Decided[Parts]:
    """The second, unless the first is agreed on or worth it. Raises what the first is if there is
    no second."""
    if isinstance(repeating, InfeasibleBudget):
        if plain is None:
            raise repeating
        return plain
    if plain is None or is_agreed or is_worth(repeating.plan, plain.plan):
        return repeating
    return plain


def _repeating(
    again: Again[Parts],
    posed: Posed,
    planning: PlanningInputs,
    first: FirstPlans,
    chosen: Recomputed,
) -> Decided[Parts] | InfeasibleBudget:
    """The plan of what backward is when it computes `chosen` again, or why there is none."""
    parts, costs = again(chosen)
    # Where none is given it is FSDP2's own peak, of the graph that FSDP2 runs.
    problem = replace(problem_of(costs, planning), budget_bytes=first.budget_bytes)
    baseline = posed.problem if posed.baseline is None else posed.baseline
    try:
        plan = plan_with_costs(costs, problem, planning.policy.reshard, baseline, first.promised)
    except InfeasibleBudget as error:
        return error
    return Decided(parts, problem, replace(plan, recompute=chosen))


def priced_on(planning: PlanningInputs) -> PricedOn:
    per_node = max(own.ranks_per_node for own in planning.settings)
    return PricedOn(planning.machine.name, per_node, planning.fused)
