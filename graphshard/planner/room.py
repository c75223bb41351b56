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
    rungs = tuple(_rung(estimate, problem, more_bytes) for more_bytes in MORE_BYTES)
    return replace(estimate, room=rungs)


def _rung(estimate: Estimate, problem: Problem, more_bytes: int) -> Rung:
    """More room is never a loss: the plan of before fits it, too."""
    budget_bytes = estimate.budget_bytes + more_bytes
    own = Rung(budget_bytes, estimate.step_time_us, estimate.peak_bytes)
    if estimate.gap <= NEAR:
        return own
    found = plan_best(replace(problem, budget_bytes=budget_bytes)).estimate
    if found.step_time_us >= estimate.step_time_us:
        return own
    return Rung(budget_bytes, found.step_time_us, found.peak_bytes)
