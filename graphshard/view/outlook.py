"""What other conditions would give: more memory, a larger batch, a faster network.

In comes a plan with costs; out come `Prospect`s, in the order in which people ask. More memory is
planned anew (`Estimate.room`); the others keep the plan's schedule, with other times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphshard.cost.whatif import Cluster, WhatIf, cluster_of, peak_parts, what_if
from graphshard.errors import CostError
from graphshard.schedule.estimate import Limit
from graphshard.schedule.plan import Estimate, Plan
from graphshard.view.brief import left_us
from graphshard.view.text import bytes_text
from graphshard.view.units import share_text, time_text

BATCH, RATE = 2, 2
# Less is within what times can be told apart by.
NOTICEABLE = 0.002
# The planner takes no memory for less than `Problem.thrift` of the step.
NOTHING = "nothing worth it"
NOT_ASKED = (
    "what more memory would buy was not planned, at most what is left to gain: in a run, "
    "graphshard.explain(model) plans it for graphshard.plans(model); so does graphshard plan"
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """gain: of the time that one sequence takes. way: "better", "worse" or "" for next to
    nothing. saved: of 1. is_best: of what the machine has room for, this gains most. is_over: the
    peak is over the plan's limit. note: what else is to be said, a sentence."""

    what: str
    step: str
    peak: str
    gain: str
    way: str
    saved: float
    is_best: bool = False
    is_over: bool = False
    note: str = ""


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
        found = _prospect(f"{more} more memory", estimate, rung.step_time_us, rung.peak_bytes)
        yield found if gains else replace(found, gain=NOTHING)
    if not estimate.room:
        most = f"at most {share_text(left_us(estimate), estimate.whole_step_us)}"
        yield Prospect("more memory", "", "", most, "", 0.0, note=NOT_ASKED)


def _elsewhere(plan: Plan, estimate: Estimate) -> Iterator[Prospect]:
    """Nothing where the machine is not a preset, or groups are sharded over several numbers of
    ranks."""
    try:
        here = cluster_of(plan)
        twice = what_if(plan, here, here, batch=BATCH)
        faster = what_if(plan, here, _faster(here))
    except (CostError, ValueError):
        return
    yield _twice(estimate, here, twice)
    yield _prospect(
        "twice the rate between nodes", estimate, faster.step_time_us, faster.peak_bytes
    )


def _twice(estimate: Estimate, here: Cluster, twice: WhatIf) -> Prospect:
    """Not the best of all where it does not fit the machine."""
    what, peak_bytes = "twice the batch per rank", twice.peak_bytes
    found = _prospect(what, estimate, twice.step_time_us, peak_bytes, BATCH)
    if peak_bytes <= estimate.budget_bytes:
        return found
    limit = "budget" if estimate.limit is Limit.BUDGET else "limit"
    theirs = replace(estimate, ours=estimate.fsdp2)
    theirs_bytes = round(sum(peak_parts(theirs, here, here.world_size, BATCH)))
    note = (
        f"{what} takes {bytes_text(peak_bytes)}, over today's {limit} of "
        f"{bytes_text(estimate.budget_bytes)}; FSDP2's own schedule would take "
        f"{bytes_text(theirs_bytes)} then"
    )
    capacity_bytes = here.machine.processor.capacity_bytes
    if capacity_bytes is not None:
        note += f"; the device has {bytes_text(capacity_bytes)}"
    fits = capacity_bytes is None or peak_bytes <= capacity_bytes
    return replace(found, is_over=True, note=note, saved=found.saved if fits else 0.0)


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
    return Prospect(what, time_text(whole_us), bytes_text(peak_bytes), text, way, gain)
