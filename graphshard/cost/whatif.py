"""A plan on another number of ranks, another network or another batch, without a new capture.

In: a plan made with the cost model and the machine it was priced for. Out: figures of the same
schedule with other times (as a formula: `graphshard.cost.plan_formula`). Each collective keeps the
ratio that it has to the cost model's formula, so that what was measured stays measured. Left as
they are: the order of steps, packing and unpacking, padding of uneven shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.cost.algebra import Quantity, ceil_div
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import Machine, collective_us
from graphshard.cost.presets import preset
from graphshard.schedule.forecast import CollectiveTime
from graphshard.schedule.groups import GroupInfo, size_bytes
from graphshard.schedule.plan import Category, Estimate, Plan, Schedule, Step, StepKind
from graphshard.schedule.replay import replayed

SHARDED = (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.OPT_STATE)
BATCHED = (Category.ACTIVATION, Category.TEMP, Category.INPUTS)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a plan runs: ranks that a group is sharded over, so many of them on each node."""

    machine: Machine
    world_size: Quantity
    ranks_per_node: Quantity


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Of forward and backward. peak_bytes: at the moment of the plan's own peak; another may hold
    more now."""

    step_time_us: float
    exposed_us: float
    peak_bytes: int


def cluster_of(plan: Plan) -> Cluster:
    """Where the plan was priced for. Raises ValueError for a plan without costs."""
    if plan.priced_on is None:
        raise ValueError("this plan does not say what it was priced for")
    machine = preset(plan.priced_on.machine)
    return Cluster(machine, max(g.world_size for g in plan.groups), plan.priced_on.ranks_per_node)


def what_if(plan: Plan, here: Cluster, there: Cluster, *, batch: float = 1.0) -> WhatIf:
    """The plan's schedule on `there`; `here` is what it was priced for.

    batch: times as many sequences per rank; compute and activations grow in proportion, which is
    too much for what depends on weights only. Raises ValueError for a plan without costs, or
    groups sharded over several numbers of ranks.
    """
    estimate = checked(plan, here)

    def work_us(step: Step, us: float) -> float:
        return us * batch if step.kind is StepKind.COMPUTE else us

    step_us = exposed_us = 0.0
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True):

        def comm_us(found: CollectiveTime, schedule: Schedule = schedule) -> float:
            own_us, other_us = (formula_us(plan, schedule, found, c) for c in (here, there))
            return float(found.us * other_us / own_us) if own_us else float(other_us)

        run = replayed(schedule, forecast, work_us, comm_us)
        step_us, exposed_us = step_us + run.us, exposed_us + run.exposed_us
    peak = sum(peak_parts(estimate, here, there.world_size, batch))
    return WhatIf(step_us, exposed_us, round(peak))


def formula_us(plan: Plan, schedule: Schedule, found: CollectiveTime, cluster: Cluster) -> Quantity:
    step = schedule.steps[found.issue]
    groups = [g for g in plan.groups if g.id in step.groups]
    if step.kind is StepKind.ALL_REDUCE_ISSUE:
        return _all_reduce_us(groups, cluster)
    gathers = step.kind is StepKind.GATHER_ISSUE
    kind = CollectiveKind.ALL_GATHER if gathers else CollectiveKind.REDUCE_SCATTER
    ranks = RankGroup(cluster.world_size, cluster.ranks_per_node)
    return collective_us(cluster.machine, kind, ranks, size_bytes(step, groups))


def _all_reduce_us(groups: Sequence[GroupInfo], cluster: Cluster) -> Quantity:
    """Over as many replicas as there are, each on the next `world_size` ranks: on a node as many as
    fit there."""
    on_node = ceil_div(cluster.ranks_per_node, cluster.world_size)
    apart = ceil_div(cluster.world_size, cluster.ranks_per_node)
    ranks = RankGroup(groups[0].replicas, on_node, node_stride=apart)
    shard_bytes = sum(g.reduce_bytes for g in groups) / cluster.world_size
    return collective_us(cluster.machine, CollectiveKind.ALL_REDUCE, ranks, shard_bytes)


def peak_parts(
    estimate: Estimate, here: Cluster, world_size: Quantity, batch: float
) -> Iterator[Quantity]:
    for category, size in estimate.ours.peak_by_category:
        if category in SHARDED:
            yield size * here.world_size / world_size
        else:
            yield size * batch if category in BATCHED else size


def checked(plan: Plan, here: Cluster) -> Estimate:
    if not plan.forecasts:
        raise ValueError("this plan has no forecasts of its steps")
    sizes = sorted({g.world_size for g in plan.groups})
    if sizes != [here.world_size]:
        raise ValueError(f"groups are sharded over {sizes} ranks, not all over {here.world_size}")
    return plan.estimate
