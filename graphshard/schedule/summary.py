"""The headline numbers of a plan, as `Plan.summary()` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.schedule.estimate import Category, Estimate, Limit, OptimizerStep, Stragglers


@dataclass(frozen=True, slots=True)
class Fsdp2Summary:
    """As in `Summary`, of FSDP2's own schedule."""

    step_time_us: float
    whole_step_us: float
    exposed_us: float
    peak_bytes: int
    peak_by_category: Mapping[Category, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of one step, and what the cost model says of it on one rank.

    graphs: forward and backward counted apart. step_time_us: forward and backward; whole_step_us:
    with the optimizer. exposed_us: compute waits so long for communication. gathered_peak_bytes:
    most bytes of gathered parameters at once. limit: what the peak was held to, and budget_bytes
    how much that is. gap: how far the whole step may be from the best possible, as a share of that.
    optimizer: None where the graph does not train. stragglers: None if they are not known.
    """

    name: str
    graphs: int
    groups: int
    params: int
    all_gathers: int
    reduce_scatters: int
    all_reduces: int
    collectives: int
    gathered_peak_bytes: int
    fingerprint: str
    step_time_us: float
    whole_step_us: float
    exposed_us: float
    peak_bytes: int
    peak_by_category: Mapping[Category, int]
    limit: Limit
    budget_bytes: int
    lower_bound_us: float
    gap: float
    fsdp2: Fsdp2Summary
    optimizer: OptimizerStep | None
    stragglers: Stragglers | None


def fsdp2_summary(estimate: Estimate) -> Fsdp2Summary:
    theirs = estimate.fsdp2
    return Fsdp2Summary(
        step_time_us=theirs.step_time_us,
        whole_step_us=estimate.whole_fsdp2_us,
        exposed_us=theirs.exposed_us,
        peak_bytes=theirs.peak_bytes,
        peak_by_category=dict(theirs.peak_by_category),
    )
