"""The best possible schedule of a small problem, as a mixed integer program.

Nothing of the planner is used but `Problem`: the rules of its simulator are written down once
more, as rows (tests/milp_direction.py). The solver's answer is a proof, within its tolerance (less
than 1e-3 us). Only what `refused` lets through is covered.
"""

from __future__ import annotations

from dataclasses import dataclass

from linear import NO, YES, Program, is_yes
from milp_direction import OneDirection, least_alive

from graphshard.schedule.plan import Direction


@dataclass(frozen=True, slots=True)
class Optimum:
    """step_us: the least time. orders: by direction, (what, number) of each event in order; what:
    "wait", "region", "gather", "reduce" or "await" (of a reduction); the number: region or group.
    """

    step_us: float
    recompute: tuple[int, ...]
    kept: tuple[int, ...]
    orders: tuple[tuple[tuple[str, int], ...], ...]


def refused(problem):
    """Why the program does not cover `problem`, or None."""
    if problem.micro_steps != 1 or problem.regroup_gathers or problem.regroup_reductions:
        return "several micro-steps, or buckets that may be cut"
    if problem.split_reductions or problem.keeps_reduce_order or problem.may_reduce_apart:
        return "reductions with rules of their own"
    if problem.most_ahead is not None:
        return "a limit on the gathers in flight"
    if any(lane.link for lane in problem.lanes) or not problem.backward:
        return "lanes that share a link, or no backward"
    if any(r.idle_bytes or r.absent for r in (*problem.forward, *problem.backward)):
        return "regions that do without what is counted in them"
    for group in problem.groups:
        part = group.parts[0]
        if len(group.parts) > 1 or group.world_size == 1 or group.node or group.post_forward:
            return f"{group.fqn} has several parts, one rank or a smaller mesh"
        if group.forward_prefetch or group.backward_prefetch or part.regather:
            return f"{group.fqn} has lists, or another gather in backward"
        uses = (part.forward, part.backward)
        if any(use is None or use.last is None for use in uses):
            return f"{group.fqn} is not used and released in both directions"
        if part.gradient is None or part.gradient.first < 0:
            return f"{group.fqn} has no gradient of its own"
    if any(alive < 0 for d in Direction for alive in least_alive(problem, d)):
        return "more may be computed again than is alive"
    return None


def optimum(problem, budget_bytes, limit_us, seconds=600.0):
    """The least step time of at most `limit_us`, or None. Raises Unsolved."""
    reason = refused(problem)
    assert reason is None, reason
    program = Program()
    again = [program.binary() for _ in problem.recompute]
    for option, taken in zip(problem.recompute, again, strict=True):
        if option.needs is not None:
            program.positive(again[option.needs] - taken)
    kept = [_kept(program, group) for group in problem.groups]
    least = [sum(r.us for r in problem.regions(d)) for d in Direction]
    sides = [
        OneDirection(program, problem, d, again, kept, budget_bytes, limit_us - sum(least) + own_us)
        for d, own_us in zip(Direction, least, strict=True)
    ]
    total_us = sides[0].end_us + sides[1].end_us
    program.positive(limit_us - total_us)
    found = program.minimize(total_us, seconds)
    if found is None:
        return None
    us, values = found
    return Optimum(
        us,
        tuple(i for i, x in enumerate(again) if is_yes(x, values)),
        tuple(g for g, k in enumerate(kept) if is_yes(k, values)),
        tuple(side.order(values) for side in sides),
    )


def _kept(program, group):
    if group.reshard is None:
        return program.binary()
    return NO if group.reshard else YES
