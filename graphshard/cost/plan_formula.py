"""A plan's time and peak as formulas, in the number of ranks and the bandwidths of their links.

In: a plan made with the cost model. Out: a `Formula`. What it leaves out is what
`graphshard.cost.whatif` leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.cost.algebra import Quantity
from graphshard.cost.symbolic import INTER, INTRA, WORLD, Formula, formula
from graphshard.cost.whatif import Cluster, checked, cluster_of, formula_us, peak_parts
from graphshard.schedule.forecast import CollectiveTime
from graphshard.schedule.plan import Plan, Schedule
from graphshard.schedule.replay import critical_path


def formula_of(plan: Plan, figure: str) -> Formula:
    """`"step_time"` or `"peak_bytes"` of the plan where it was priced for (see below)."""
    if figure == "step_time":
        return step_time_formula(plan, cluster_of(plan))
    if figure == "peak_bytes":
        return peak_bytes_formula(plan, cluster_of(plan))
    raise ValueError(f"no formula of {figure!r}; there are 'step_time' and 'peak_bytes'")


def step_time_formula(plan: Plan, here: Cluster) -> Formula:
    """Microseconds along the critical path, in W and the bandwidths of a rank's links.

    Exact at the plan's own numbers. For other numbers another path may be longer, so there it is a
    lower bound of what the schedule takes; `what_if` follows all paths. Raises as `what_if` does.
    """
    checked(plan, here)
    network = replace(here.machine.network, intra_bytes_per_us=INTRA, inter_bytes_per_us=INTER)
    there = Cluster(replace(here.machine, network=network, measured=()), WORLD, here.ranks_per_node)
    alone = replace(here, machine=replace(here.machine, measured=()))
    total: Quantity = 0.0
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True):
        path = critical_path(schedule, forecast)
        total += path.work_us
        for us, own_us, other_us in _terms(plan, schedule, path.collectives, alone, there):
            total += us / own_us * other_us
    return formula(total)


def peak_bytes_formula(plan: Plan, here: Cluster) -> Formula:
    """Bytes at the moment of the plan's peak, in W: shards shrink with it, the rest stays.

    Raises as `what_if` does.
    """
    return formula(sum(peak_parts(checked(plan, here), here, WORLD, 1.0)))


def _terms(
    plan: Plan,
    schedule: Schedule,
    collectives: tuple[CollectiveTime, ...],
    here: Cluster,
    there: Cluster,
) -> Iterator[tuple[float, float, Quantity]]:
    """Of each collective: what it takes, and the formula's value here and there."""
    for found in collectives:
        own_us = float(formula_us(plan, schedule, found, here))
        if own_us:
            yield found.us, own_us, formula_us(plan, schedule, found, there)
