"""Why a plan is as it is, in numbers.

In come FSDP2's placed candidate and the chosen one; out come the gains, what each decision costs
and saves, and why each collective is not issued earlier. The gains are differences of simulated
steps on the way from FSDP2's candidate to the chosen one, one kind of decision at a time, so they
add up to the whole difference; times are exact (`problem.TICK_US`), so without a remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphshard.planner.choices import Bucket, Choices, Cuts, first_use
from graphshard.planner.compare import placed_as
from graphshard.planner.events import micro_steps_of
from graphshard.planner.explain_issue import why_not_earlier
from graphshard.planner.memo import Memo
from graphshard.planner.problem import Group, gather_of
from graphshard.planner.score import Candidate, SearchContext, score, start_bytes
from graphshard.planner.simulate import Simulation
from graphshard.planner.stage import stage_of
from graphshard.schedule.plan import Direction, StepKind
from graphshard.schedule.reasons import (
    Decision,
    Gain,
    Hold,
    HoldRule,
    Merge,
    Reason,
    Split,
)


def reasons_of(
    context: SearchContext,
    before: Sequence[tuple[Decision, Candidate]],
    best: Candidate,
    ours: Simulation,
    fsdp2: Simulation,
) -> Iterator[Reason]:
    """fsdp2: FSDP2's predicted step; the gains add up to what `best` saves of it.

    before: FSDP2's own choices as they come out after one thing and another that is not a choice of
    the schedule; after the last of them they are those of this problem.
    """
    memo, own = context.memo, before[-1][1]
    yield from _gains(context, before, best, fsdp2)
    yield from _keeps(memo, own.choices, best.choices)
    yield from _cuts(memo, best.choices)
    yield from why_not_earlier(context, best, ours)


def _gains(
    context: SearchContext,
    before: Sequence[tuple[Decision, Candidate]],
    best: Candidate,
    fsdp2: Simulation,
) -> Iterator[Reason]:
    before_us, before_bytes = fsdp2.step_us, fsdp2.peak_bytes
    for decision, us, peak_bytes in _way(context, before, best):
        if (us, peak_bytes) != (before_us, before_bytes):
            yield Gain(decision, before_us - us, before_bytes - peak_bytes, before_us)
        before_us, before_bytes = us, peak_bytes


def _way(
    context: SearchContext, before: Sequence[tuple[Decision, Candidate]], best: Candidate
) -> Iterator[tuple[Decision, float, int]]:
    """From FSDP2's candidate to the chosen one: each kind of decision with the step and the peak
    after it."""
    memo, chosen = context.memo, best.choices
    for decision, placed in before:
        yield decision, placed.us, placed.peak_bytes
    own = before[-1][1]
    if own == best:
        return
    for decision, now in _choices(own.choices, chosen):
        placed = placed_as(memo, now)
        yield decision, placed.us, placed.peak_bytes
    yield Decision.REDUCTIONS, *_with_reductions(context, best)
    yield Decision.GATHERS, best.us, best.peak_bytes


def _choices(own: Choices, chosen: Choices) -> Iterator[tuple[Decision, Choices]]:
    now = replace(own, kept=chosen.kept, across=chosen.across)
    yield Decision.KEPT, now
    now = replace(now, on_node=chosen.on_node)
    yield Decision.ON_NODE, now
    now = replace(now, forward=chosen.forward, backward=chosen.backward, reduce=chosen.reduce)
    yield Decision.BUCKETS, now
    now = replace(now, recompute=chosen.recompute)
    yield Decision.RECOMPUTE, now
    yield Decision.OFFLOAD, replace(now, offload=chosen.offload)


def _with_reductions(context: SearchContext, best: Candidate) -> tuple[float, int]:
    """The chosen reductions with FSDP2's gathers."""
    theirs = placed_as(context.memo, best.choices)
    us, peak_bytes = 0.0, 0
    rows = zip(context.problem.directions, theirs.directions, best.directions, strict=True)
    for direction, their, our in rows:
        stages = [
            stage_of(context.memo, best.choices, direction, micro)
            for micro, _ in micro_steps_of(context.problem)
        ]
        starts = start_bytes(context, best.choices, direction)
        placement = replace(their.placement, reductions=our.placement.reductions)
        scored = score(context, stages, starts, placement)
        us, peak_bytes = us + scored.us, max(peak_bytes, scored.peak_bytes)
    return us, peak_bytes


# -- decisions -----------------------------------------------------------------------------------


def _keeps(memo: Memo, theirs: Choices, chosen: Choices) -> Iterator[Reason]:
    """One reason for each group that could be kept from forward to backward."""
    kept, across, before = set(chosen.kept), set(chosen.across), set(theirs.kept)
    for group in memo.problem.groups:
        if any(group.use_in(d) is None for d in Direction):
            continue
        rule = None
        if group.reshard is not None:
            rule = HoldRule.USER
        elif (group.id in kept) == (group.id in before) and group.id not in chosen.on_node:
            rule = HoldRule.FSDP2
        yield Hold(
            group=group.id,
            is_kept=group.id in kept,
            saved_us=sum(gather_of(part, Direction.BACKWARD).us for part in group.parts),
            held_us=_held_us(memo, group),
            held_bytes=group.gathered_bytes,
            across=group.id in across,
            on_node=group.id in chosen.on_node,
            rule=rule,
        )


def _held_us(memo: Memo, group: Group) -> float:
    """Compute between its last use in forward and its first one in backward."""
    use = group.use_in(Direction.FORWARD)
    last = len(memo.problem.forward) - 1 if use is None or use.last is None else use.last
    until = first_use(memo, Bucket((group.id,)), Direction.BACKWARD)
    between = (*memo.problem.forward[last + 1 :], *memo.problem.backward[:until])
    return sum(r.us for r in between)


def _cuts(memo: Memo, chosen: Choices) -> Iterator[Reason]:
    directions = ((Direction.FORWARD, chosen.forward), (Direction.BACKWARD, chosen.backward))
    for direction, cuts in directions:
        yield from _cut(memo, cuts, direction, StepKind.GATHER_ISSUE)
    yield from _cut(memo, chosen.reduce, Direction.BACKWARD, StepKind.REDUCE_ISSUE)


def _cut(memo: Memo, cuts: Cuts, direction: Direction, kind: StepKind) -> Iterator[Reason]:
    def launch_us(group: Group) -> float:
        reduces = kind is StepKind.REDUCE_ISSUE
        lane = group.reduce_lane if reduces else group.lane_in(direction)
        return memo.problem.lanes[lane].launch_us

    groups = memo.problem.groups
    for number in cuts.joined:
        yield Merge(number, direction, kind, launch_us(groups[number]))
    for number in cuts.split:
        group = groups[number]
        yield Split(number, direction, kind, len(group.parts), launch_us(group))
