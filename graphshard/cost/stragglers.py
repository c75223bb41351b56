"""What a step takes where no two ranks are equally fast and all wait for the slowest.

In: a plan with forecasts, the machine it was priced on, and how many ranks wait for each other.
Out: the same plan, whose estimate says how much longer the slowest rank makes the step.

Compute times of ranks are taken to be normal with the machine's `compute_spread`, each rank as fast
through the whole step. So the slowest of W ranks computes 1 + spread * E[max of W standard normals]
times as long as the mean, all others wait for it, and its step is the plan's own order with that
compute: what was hidden behind communication may stay hidden. Contention between nodes, and ranks
that are broken rather than slow, are left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import erfc, expm1, log1p, sqrt

from graphshard.cost.machine import Machine
from graphshard.schedule.estimate import Stragglers
from graphshard.schedule.forecast import Forecast
from graphshard.schedule.plan import Plan, Schedule, Step, StepKind
from graphshard.schedule.replay import replayed

# Beyond these a standard normal is never, and 2**24 of them hardly are.
LOW, HIGH, STEPS = -12.0, 12.0, 2_400


@cache
def expected_max(count: int) -> float:
    """Of `count` independent standard normals: the integral of x dF(x)**count.

    By parts from LOW on, where F is 0: LOW + integral of 1 - F(x)**count (H. A. David, H. N.
    Nagaraja, "Order Statistics", 3rd ed., 2003, section 3.1). The trapezoid rule is exact to the
    last digits for a function that is flat at both ends.
    """
    width = (HIGH - LOW) / STEPS
    values = [_is_above(LOW + index * width, count) for index in range(STEPS + 1)]
    return LOW + width * (sum(values) - (values[0] + values[-1]) / 2)


def _is_above(x: float, count: int) -> float:
    """How probable it is that the largest of `count` normals is above `x`."""
    above = erfc(x / sqrt(2)) / 2
    return 1.0 if above >= 1 else -expm1(count * log1p(-above))


def slowest(spread: float, ranks: int) -> float:
    """The expected compute time of the slowest of `ranks`, over that of the mean one."""
    return 1 + spread * expected_max(ranks)


def with_stragglers(plan: Plan, machine: Machine, ranks: int) -> Plan:
    """`plan`, with what stragglers add to its step and to FSDP2's, if the machine has some."""
    estimate, spread = plan.estimate, machine.compute_spread
    if plan.fsdp2 is None or ranks == 1 or not spread:
        return plan
    factor = slowest(spread, ranks)
    ours = _longer(plan.schedules, plan.forecasts, factor)
    theirs = _longer(plan.fsdp2.schedules, plan.fsdp2.forecasts, factor)
    found = Stragglers(
        ranks, spread, ours * estimate.step_time_us, theirs * estimate.fsdp2.step_time_us
    )
    return replace(plan, estimate=replace(estimate, stragglers=found))


def _longer(
    schedules: tuple[Schedule, ...], forecasts: tuple[Forecast, ...], factor: float
) -> float:
    """How much longer a micro-step takes with `factor` times the compute, as a share of it."""

    def work_us(step: Step, us: float) -> float:
        return us * factor if step.kind is StepKind.COMPUTE else us

    pairs = list(zip(schedules, forecasts, strict=True))
    own_us = sum(forecast.us for _, forecast in pairs)
    slow_us = sum(replayed(*pair, work_us, lambda found: found.us).us for pair in pairs)
    return max(slow_us / own_us - 1, 0.0) if own_us else 0.0
