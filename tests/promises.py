"""What every plan promises: its budget, no more time than FSDP2's own order, the lower bound, and
gains that add up to the byte and the microsecond."""

from dataclasses import replace

from graphshard.errors import InfeasibleBudget
from graphshard.planner.plan_step import fsdp2, plan_step
from graphshard.schedule.reasons import Gain


def planned_within(problem, share):
    """FSDP2's own plan, and one within `share` of its peak; None where no plan is, which may only
    be below FSDP2's."""
    own = fsdp2(problem)
    budget = int(own.peak_bytes * share)
    try:
        planned = plan_step(replace(problem, budget_bytes=budget))
    except InfeasibleBudget:
        assert own.peak_bytes > budget
        return own, None
    assert planned.estimate.peak_bytes <= budget
    return own, planned


def check(problem, share):
    """share: what the budget is of FSDP2's own peak."""
    own, planned = planned_within(problem, share)
    if planned is None:
        return
    budget, estimate = int(own.peak_bytes * share), planned.estimate
    assert estimate.lower_bound_us <= estimate.step_time_us
    if own.peak_bytes <= budget:
        assert estimate.step_time_us <= own.us
    gains = [reason for reason in planned.reasons if isinstance(reason, Gain)]
    gains_us = sum(gain.gain_us for gain in gains)
    assert gains_us == estimate.fsdp2.step_time_us - estimate.step_time_us
    gains_bytes = sum(gain.gain_bytes for gain in gains)
    assert gains_bytes == estimate.fsdp2.peak_bytes - estimate.peak_bytes
    assert sum(size for _, size in estimate.ours.peak_by_category) == estimate.peak_bytes
