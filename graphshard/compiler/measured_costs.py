"""Measured costs on disk, so that the next launch is planned with them at once.

In: a problem as it is priced. Out: the same problem at the costs of which a plan was kept before
(`graphshard.compiler.tuning`), by this version of torch and of the planner.

Assumed: this launch has the machine and the network of that one. Where it has not, its first plan
is only another one than it would have been: its own first steps are measured all the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from graphshard.compiler.decide import PlannedPartition
from graphshard.compiler.plan_cache import key_of
from graphshard.compiler.planning import plan_with_costs, torch_version
from graphshard.errors import InfeasibleBudget, PlanError
from graphshard.files import cache
from graphshard.files.decode import decode, parse
from graphshard.planner.checked import checked
from graphshard.planner.problem import Part, Problem, Transfer, with_transfers
from graphshard.schedule.plan import Reshard
from graphshard.schedule.steps import to_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Posed:
    """A problem as it was priced; its measured costs are under `key`, whoever plans it."""

    key: str
    problem: Problem


def posed_by(planned: PlannedPartition) -> Posed:
    """Before anything of it was measured but what a few collectives take, which is never twice the
    same: the key has no costs, only whose they are."""
    priced_on = planned.plan.priced_on
    machine = "" if priced_on is None else priced_on.machine
    problem = _without_costs(planned.problem)
    key = key_of(problem, None, planned.plan.groups, f"{torch_version()} {machine}")
    return Posed(key, planned.problem)


def at_measured_costs(
    planned: PlannedPartition, posed: Posed, reshard: Reshard
) -> PlannedPartition:
    """`planned` again, at costs of an earlier launch; as it is if there are none, or if no plan
    fits."""
    problem = load(posed)
    if problem is None:
        return planned
    try:
        plan = plan_with_costs(planned.parts.placed, problem, reshard, start=planned.plan)
    except InfeasibleBudget as error:
        logger.debug("%s: not with measured costs: %s", planned.plan.name, error.message)
        return planned
    before = planned.plan
    plan = replace(plan, recompute=before.recompute, priced_on=before.priced_on)
    return replace(planned, problem=problem, plan=plan)


def load(posed: Posed) -> Problem | None:
    """The problem at measured costs; None if there are none that can be used (GS706)."""

    def use(text: str) -> Problem:
        found: Problem = decode(Problem, parse(text))
        if _without_costs(found) != _without_costs(posed.problem):
            raise PlanError("GS603", "its costs are of another problem")
        return checked(found)

    return cache.load(posed.key, cache.Kind.COSTS, use)


def save(posed: Posed, measured: Problem) -> None:
    """measured: the same at measured costs; its reductions may have lanes of their own."""
    found = replace(
        posed.problem,
        groups=tuple(
            replace(own, parts=other.parts)
            for own, other in zip(posed.problem.groups, measured.groups, strict=True)
        ),
        lanes=tuple(
            replace(own, launch_us=other.launch_us)
            for own, other in zip(posed.problem.lanes, measured.lanes, strict=False)
        ),
        forward=measured.forward,
        backward=measured.backward,
        offloads=measured.offloads,
    )
    cache.save(posed.key, cache.Kind.COSTS, to_json(found))


def _without_costs(problem: Problem) -> Problem:
    return replace(
        problem,
        groups=tuple(replace(g, parts=tuple(map(_free, g.parts))) for g in problem.groups),
        lanes=tuple(replace(lane, launch_us=0.0) for lane in problem.lanes),
        forward=tuple(replace(region, us=0.0) for region in problem.forward),
        backward=tuple(replace(region, us=0.0) for region in problem.backward),
        recompute=tuple(replace(offer, extra_us=0.0) for offer in problem.recompute),
        offloads=tuple(replace(offload, us=0.0) for offload in problem.offloads),
    )


def _free(part: Part) -> Part:
    # A gather in backward is measured apart wherever there is one.
    return with_transfers(replace(part, regather=None), _at_no_cost)


def _at_no_cost(transfer: Transfer) -> Transfer:
    return Transfer(0.0, in_place=transfer.in_place)
