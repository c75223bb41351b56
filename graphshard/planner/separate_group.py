"""Whether reductions get lanes of their own: second process groups over the same ranks.

They add no bandwidth (`graphshard.planner.links`). They hide launches, where many small collectives
follow each other, and cost a communicator, so they have to gain WORTH.
"""

from __future__ import annotations

from dataclasses import replace

from graphshard.errors import InfeasibleBudget
from graphshard.planner.choices import Choices
from graphshard.planner.plan_step import Planned, plan_step
from graphshard.planner.problem import Problem
from graphshard.schedule.plan import Estimate

WORTH = 0.02


def plan_best(
    problem: Problem, baseline: Problem | None = None, start: Choices | None = None
) -> Planned:
    """`plan_step`, with reductions on lanes of their own where that is open and gains WORTH."""
    found = plan_step(problem, baseline, start)
    if not problem.may_reduce_apart or not _may_gain(problem, found.estimate):
        return found
    try:
        other = plan_step(reductions_apart(problem), baseline, start)
    except InfeasibleBudget:
        return found
    is_worth = other.estimate.ours.step_time_us <= (1 - WORTH) * found.estimate.ours.step_time_us
    return other if is_worth else found


def reductions_apart(problem: Problem) -> Problem:
    """`problem` with a new lane for the reductions of each lane, on the same link."""
    count, fresh = len(problem.lanes), dict[int, int]()
    for group in problem.groups:
        fresh.setdefault(group.reduce_lane, count + len(fresh))
    links = {lane: problem.lanes[lane].link or problem.lanes[lane].name for lane in fresh}
    lanes = [replace(x, link=links.get(i, x.link)) for i, x in enumerate(problem.lanes)]
    for lane in fresh:
        old = problem.lanes[lane]
        lanes.append(replace(old, name=f"{old.name}, reductions", link=links[lane]))
    return replace(
        problem,
        lanes=tuple(lanes),
        groups=tuple(replace(g, reduce_lane=fresh[g.reduce_lane]) for g in problem.groups),
        may_reduce_apart=False,
        reduces_apart=True,
    )


def _may_gain(problem: Problem, estimate: Estimate) -> bool:
    """At most the launches that stand alone: those of the gathers or those of the reductions."""
    launches_us = sum(
        len(group.parts) * problem.lanes[group.reduce_lane].launch_us for group in problem.groups
    )
    least_us = WORTH * estimate.ours.step_time_us
    return min(launches_us, estimate.ours.exposed_us) >= least_us
