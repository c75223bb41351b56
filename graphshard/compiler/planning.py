"""Runs passes and checks every rule after each of them - the only place that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from graphshard.compiler import plan_cache
from graphshard.cost.machine import Machine
from graphshard.errors import InfeasibleBudget
from graphshard.fsdp2.settings import GroupSettings
from graphshard.graph import structured_log
from graphshard.graph.collectives import note_ranks
from graphshard.graph.program import Program, note_attributes
from graphshard.graph.verify import verify
from graphshard.passes import CAPTURED, PLACEMENT
from graphshard.passes.apply_plan import apply_plan
from graphshard.passes.insert_offloads import insert_offloads
from graphshard.passes.regroup import regroup
from graphshard.planner.activations import DEARER
from graphshard.planner.choices import Choices, choices_of, offloads_of
from graphshard.planner.follow import as_fsdp2, following
from graphshard.planner.infeasible import may_fit
from graphshard.planner.plan_step import Planned
from graphshard.planner.problem import Problem
from graphshard.planner.separate_group import plan_best
from graphshard.pricing.held import folded
from graphshard.pricing.offload import offloadable
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.problem import PlanningPolicy, price
from graphshard.pricing.recompute import activation_of, offered
from graphshard.schedule.plan import Figures, GroupInfo, Plan, Recomputed, Reshard

logger = logging.getLogger(__name__)

# A predicted step is right to about two hundredths: a gain that does not stand that, and what is
# computed again to take DEARER, may be none.
WORTHWHILE = 0.02

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
        structured_log.graph_after(name, program.joint)
    for direction, module in program.by_direction.items():
        structured_log.graph_after(f"{name}_{direction}", module)
    logger.debug("%s: %s done", program.name, name)
    return program


def run_captured(program: Program) -> Program:
    """The passes on the captured form (joint graph, or forward graph under no_grad)."""
    for module in program.graphs:
        note_attributes(module.graph)
        note_ranks(module.graph)
    return run_passes(program, CAPTURED)


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """What a plan with the cost model needs to know.

    fused: compute is priced as a compiler fuses it (see `graphshard.pricing.op_costs.graph_costs`).
    recompute_as: what the ranks have agreed to compute again in a graph of these groups; None if
    they have agreed on nothing yet.
    """

    settings: tuple[GroupSettings, ...]
    machine: Machine
    policy: PlanningPolicy
    fused: bool = False
    recompute_as: Recomputed | None = None

    @property
    def in_parts(self) -> bool:
        """Parts of a group may travel alone, and there is somewhere to travel to."""
        return self.policy.regroup and any(own.ranks > 1 for own in self.settings)


def place(program: Program, offloaded: Mapping[str, int] = MappingProxyType({})) -> Program:
    """Naive placement: every communication step stands where it is needed. offloaded: ops whose
    results the host holds until backward, each with its group."""
    placed = run_passes(program, PLACEMENT)
    if not offloaded:
        return placed
    return _checked(insert_offloads(placed, offloaded), insert_offloads.__name__)


def problem_of(costs: GraphCosts, planning: PlanningInputs) -> Problem:
    """The problem that a placed program poses, as it was partitioned."""
    return price(costs, planning.settings, planning.machine, planning.policy)


@dataclass(frozen=True, slots=True)
class Posed:
    """What a placed program poses, as it was partitioned.

    checkpoints: of the user, as in `Recomputed`. baseline: what FSDP2 would run, where they were
    taken out of the program.
    """

    costs: GraphCosts
    problem: Problem
    checkpoints: int = 0
    baseline: Problem | None = None

    @property
    def replaced(self) -> bool:
        """The plan decides in the place of the user's checkpoints."""
        return self.baseline is not None


@dataclass(frozen=True, slots=True)
class FirstPlans:
    """What to compute again or to offload, within what budget, and the best plan that does neither;
    None if none of these fits. promised: the plan that does, of what it frees by promise."""

    recompute: Recomputed
    budget_bytes: int
    without: Plan | None
    promised: Plan | None = None


@contextmanager
def saying_what_is_held(costs: GraphCosts) -> Iterator[None]:
    """An InfeasibleBudget from inside says what no plan could free."""
    try:
        yield
    except InfeasibleBudget as error:
        raise InfeasibleBudget(replace(error.shortage, held=folded(costs.held))) from None


def first_plans(posed: Posed, planning: PlanningInputs) -> FirstPlans:
    """What the ranks have agreed to compute again, if they have and the graph can; else the best.

    Other ranks may run a graph of theirs beside this one (a batch of another length): of graphs
    that compute other things again the collectives differ. Raises InfeasibleBudget.
    """
    agreed, costs = planning.recompute_as, posed.costs
    offers = {activation_of(unit, costs.groups) for unit in costs.units}
    if agreed is None or not offers.issuperset((*agreed.activations, *agreed.offloaded)):
        chosen, without = best_plans(posed, planning)
        if not chosen.recompute.changes_graph:
            without = chosen
        return FirstPlans(chosen.recompute, chosen.estimate.budget_bytes, without, chosen)
    try:
        without = _plan_of_posed(posed, posed.problem, planning)
    except InfeasibleBudget as error:
        if not agreed.changes_graph:
            raise
        return FirstPlans(agreed, error.shortage.budget_bytes, None)
    return FirstPlans(agreed, without.estimate.budget_bytes, without)


def best_plans(posed: Posed, planning: PlanningInputs) -> tuple[Plan, Plan | None]:
    """The best plan, and the best one that leaves the graph as it is if that is another one:
    backward computes something again, or the host holds it, if the budget needs that, or if it is
    worth it.

    Raises InfeasibleBudget if no choice fits the policy's budget.
    """
    problem = posed.problem
    offering = with_options(posed, planning)
    if offering is problem:
        return _plan_of_posed(posed, problem, planning), None
    chosen = _plan_of_posed(posed, offering, planning)
    if not chosen.recompute.changes_graph or not may_fit(problem):
        return chosen, None
    try:
        without = _plan_of_posed(posed, problem, planning)
    except InfeasibleBudget:
        return chosen, None
    return (chosen, without) if is_worth(chosen, without) else (without, None)


def with_options(posed: Posed, planning: PlanningInputs) -> Problem:
    """The problem, with what backward could compute again and the host could hold; the same one
    where the policy, or the graph, has nothing of that."""
    if not planning.policy.recompute or not posed.costs.units:
        return posed.problem
    groups, found = posed.costs.groups, posed.costs.units
    problem, host = offered(posed.problem, groups, found), planning.machine.host
    if problem.host is None or host is None:
        return problem
    return offloadable(problem, groups, found, host)


def _plan_of_posed(posed: Posed, problem: Problem, planning: PlanningInputs) -> Plan:
    """problem: that of `posed`, or the same with options."""
    with saying_what_is_held(posed.costs):
        plan = plan_with_costs(posed.costs, problem, planning.policy.reshard, posed.baseline)
    chosen = replace(plan.recompute, checkpoints=posed.checkpoints, replaced=posed.replaced)
    return replace(plan, recompute=chosen)


def is_worth(repeating: Plan, without: Plan) -> bool:
    """Computing something again gains WORTHWHILE, even if that is DEARER than predicted."""
    theirs, ours = without.estimate.ours, repeating.estimate.ours
    gain_us = theirs.step_time_us - ours.step_time_us
    added_us = _busy_us(ours) - _busy_us(theirs)
    return gain_us - DEARER * max(0.0, added_us) >= WORTHWHILE * theirs.step_time_us


def _busy_us(figures: Figures) -> float:
    return figures.step_time_us - figures.exposed_us


def plan_with_costs(
    program: Program | GraphCosts,
    problem: Problem,
    reshard: Reshard,
    baseline: Problem | None = None,
    start: Plan | None = None,
) -> Plan:
    """The best plan that the planner finds. Raises InfeasibleBudget if none fits the budget.

    problem: what the program poses, or that with other times. baseline: what FSDP2 would run, if
    that is another problem: one that computes something else again. start: of a problem much like
    it.
    """
    groups = _groups(program, problem, reshard)
    if problem.near:  # quicker made than stored
        return _planned(program.name, groups, problem, baseline, None)
    version = torch_version()
    begun = None if start is None else choices_of(start.schedules, start.across)
    key = plan_cache.key_of(problem, baseline, groups, version, begun)
    plan = plan_cache.load(
        key, program.name, lambda found: plan_cache.check(found, problem, groups, version)
    )
    if plan is None:
        plan = _planned(program.name, groups, problem, baseline, begun)
        plan_cache.save(key, plan)
    return plan


def plan_following(
    program: Program,
    problem: Problem,
    reshard: Reshard,
    limit_bytes: int | None,
    own: Plan,
    agreed: Plan | None,
) -> Plan | None:
    """A plan of `program` that issues what `agreed` does, in its order; None: what FSDP2 does.

    own: what was planned for it, which says what is computed again. None if there is no such plan,
    or none within limit_bytes, if those are given.
    """
    if own.recompute.offloaded:
        return None
    if agreed is None:
        planned: Planned | None = as_fsdp2(problem)
    else:
        planned = following(problem, agreed.schedules, agreed.across)
    if planned is None:
        return None
    if limit_bytes is not None and planned.estimate.ours.peak_bytes > limit_bytes:
        return None
    plan = _plan_made(own.name, _groups(program, problem, reshard), problem, planned)
    apart = agreed is not None and agreed.reduces_apart
    found = replace(plan, recompute=own.recompute, priced_on=own.priced_on, reduces_apart=apart)
    fits = agreed is None or found.collective_signature == agreed.collective_signature
    return found if fits else None


def plan_as_fsdp2(costs: GraphCosts, problem: Problem, planning: PlanningInputs) -> Plan:
    """FSDP2's own schedule, whatever its peak: nothing is searched."""
    groups = _groups(costs, problem, planning.policy.reshard)
    return _plan_made(costs.name, groups, problem, as_fsdp2(problem))


def _groups(
    program: Program | GraphCosts, problem: Problem, reshard: Reshard
) -> tuple[GroupInfo, ...]:
    return tuple(
        replace(
            info,
            resharded_by=reshard if group.reshard is None else Reshard.FSDP2,
            gathers_in_place=all(part.gather.in_place for part in group.parts),
        )
        for info, group in zip(program.groups, problem.groups, strict=True)
    )


def _planned(
    name: str,
    groups: tuple[GroupInfo, ...],
    problem: Problem,
    baseline: Problem | None,
    start: Choices | None,
) -> Plan:
    return _plan_made(name, groups, problem, plan_best(problem, baseline, start))


def _plan_made(
    name: str, groups: tuple[GroupInfo, ...], problem: Problem, planned: Planned
) -> Plan:
    held = {o.group: o.bytes for o in offloads_of(problem, Choices(offload=planned.offload))}
    groups = tuple(
        replace(
            info,
            between_micro_steps=info.id in planned.across,
            offloaded_bytes=held.get(info.id, 0),
        )
        for info in groups
    )
    again = (problem.recompute[index].activation for index in planned.recompute)
    away = (problem.offload_options[index].activation for index in planned.offload)
    forward, *backward = planned.schedules
    return Plan(
        name=name,
        torch_version=torch_version(),
        groups=groups,
        forward=forward,
        backward=backward[0] if backward else None,
        estimate=planned.estimate,
        recompute=Recomputed(tuple(again), offloaded=tuple(away)),
        reasons=planned.reasons,
        forecasts=planned.forecasts,
        fsdp2=planned.fsdp2,
        reduces_apart=planned.reduces_apart,
    )


def apply(program: Program, plan: Plan) -> Program:
    """A placed program in the plan's order."""
    program = program.with_groups(plan.groups)
    for follow in (regroup, apply_plan):
        program = _checked(follow(program, plan), follow.__name__)
    return program


def torch_version() -> str:
    return torch.__version__.split("+")[0]
