"""What more memory would buy: the same step planned again with a few larger budgets."""

from __future__ import annotations

from dataclasses import replace

from graphshard.planner.problem import Problem
from graphshard.planner.separate_group import plan_best
from graphshard.schedule.estimate import Estimate, Rung

MORE_BYTES = (2**30, 10 * 2**30)
# So near the lower bound nothing is left to buy.
NEAR = 0.0005


def with_room(estimate: Estimate, problem: Problem) -> Estimate:
    """`estimate` with a rung for each of MORE_BYTES; problem: what it is of. What is computed again
    stays."""
    rungs: list[Rung] = []
    for more_bytes in sorted(MORE_BYTES, reverse=True):
        budget_bytes = estimate.budget_bytes + more_bytes
        if rungs and rungs[-1].peak_bytes <= budget_bytes:
            # What the larger budget buys fits this one, too. Another search could find a better
            # plan here; it would find it there as well, if it searched as much.
            rungs.append(replace(rungs[-1], budget_bytes=budget_bytes))
        else:
            rungs.append(_rung(estimate, problem, budget_bytes))
    return replace(estimate, room=tuple(reversed(rungs)))


def _rung(estimate: Estimate, problem: Problem, budget_bytes: int) -> Rung:
    """The plan of before fits a larger budget, too: it stays unless another is worth its memory
    (`Problem.thrift`), as within one budget. So more room is never a loss, and none is spent for
    next to nothing."""
    own = Rung(budget_bytes, estimate.step_time_us, estimate.peak_bytes)
    if own.step_time_us <= (1 + max(NEAR, problem.thrift)) * estimate.lower_bound_us:
        return own
    found = plan_best(replace(problem, budget_bytes=budget_bytes, near=NEAR)).estimate
    fullest_us = found.step_time_us if found.all_spent is None else found.all_spent.step_time_us
    if own.step_time_us <= (1 + problem.thrift) * fullest_us:
        return own
    return Rung(budget_bytes, found.step_time_us, found.peak_bytes)
