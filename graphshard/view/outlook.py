"""What other conditions would give: more memory, a larger batch, a faster network.

In comes a plan with costs; out come `Prospect`s, in the order in which people ask. More memory is
planned anew (`Estimate.room`); the others keep the plan's schedule, with other times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphshard.cost.whatif import Cluster, cluster_of, what_if
from graphshard.errors import CostError
from graphshard.schedule.estimate import Limit
from graphshard.schedule.plan import Estimate, Plan
from graphshard.view.text import bytes_text
from graphshard.view.units import share_text, time_text

BATCH, RATE = 2, 2
# Less is within what times can be told apart by.
NOTICEABLE = 0.002


@dataclass(frozen=True, slots=True)
class Prospect:
    """gain: of the time that one sequence takes. way: "better", "worse" or "" for next to
    nothing. saved: of 1. is_best: of what can be had, this gains most."""

    what: str
    step: str
    peak: str
    gain: str
    way: str
    saved: float
    is_best: bool = False


def prospects(plan: Plan) -> list[Prospect]:
    """Empty for a plan without forecasts."""
    estimate = plan.estimate
    if not plan.forecasts:
        return []
    found = [*_room(estimate), *_elsewhere(plan, estimate)]
    best = max(found, key=lambda one: one.saved, default=None)
    marked = [replace(one, is_best=one is best and one.way == "better") for one in found]
    return [*marked, _bound(estimate)]


def _room(estimate: Estimate) -> Iterator[Prospect]:
    """If the largest gains nothing, it alone."""
    gains = any(rung.step_time_us < estimate.step_time_us for rung in estimate.room)
    for rung in estimate.room if gains else estimate.room[-1:]:
        more = bytes_text(rung.budget_bytes - estimate.budget_bytes)
        yield _prospect(f"{more} more memory", estimate, rung.step_time_us, rung.peak_bytes)


def _elsewhere(plan: Plan, estimate: Estimate) -> Iterator[Prospect]:
    """Nothing where the machine is not a preset, or groups are sharded over several numbers of
    ranks."""
    try:
        here = cluster_of(plan)
        twice = what_if(plan, here, here, batch=BATCH)
        faster = what_if(plan, here, _faster(here))
    except (CostError, ValueError):
        return
    yield _prospect(
        "twice the batch per rank", estimate, twice.step_time_us, twice.peak_bytes, BATCH
    )
    yield _prospect(
        "twice the rate between nodes", estimate, faster.step_time_us, faster.peak_bytes
    )


def _faster(here: Cluster) -> Cluster:
    network = here.machine.network
    network = replace(network, inter_bytes_per_us=RATE * network.inter_bytes_per_us)
    return replace(here, machine=replace(here.machine, network=network))


def _bound(estimate: Estimate) -> Prospect:
    least_us = min(estimate.lower_bound_us, estimate.step_time_us)
    return replace(_prospect("the best schedule there could be", estimate, least_us, 0), peak="any")


def _prospect(
    what: str, estimate: Estimate, step_us: float, peak_bytes: int, batch: int = 1
) -> Prospect:
    """step_us: of forward and backward. batch: times as many sequences in it."""
    own_us, whole_us = estimate.whole_step_us, step_us + estimate.optimizer_us
    gain = 1 - whole_us / batch / own_us if own_us else 0.0
    way = "" if abs(gain) < NOTICEABLE else "better" if gain > 0 else "worse"
    text = "nothing"
    if way:
        text = f"{'-' if gain > 0 else '+'}{share_text(abs(gain), 1.0)}"
        text += " per sequence" if batch > 1 else ""
    peak = bytes_text(peak_bytes)
    if batch > 1 and estimate.limit is Limit.BUDGET and peak_bytes > estimate.budget_bytes:
        peak += ", over the budget"
    return Prospect(what, time_text(whole_us), peak, text, way, gain)
