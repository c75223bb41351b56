"""Why no schedule fits the budget: how much is missing, who holds it, what would help.

Every change that is named was planned with: its number is what the least peak would become.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.planner.activations import Offload
from graphshard.planner.checked import checked
from graphshard.planner.compare import simulated
from graphshard.planner.memo import Memo
from graphshard.planner.moves import lean_choices
from graphshard.planner.problem import Problem, Region
from graphshard.planner.score import Candidate, SearchContext, candidate
from graphshard.schedule.shortage import Help, Remedy, Shortage

HALVINGS = 10  # 0.1 % of the distance between the first bounds
OWNERS = 4
LEAST_PLAUSIBLE_BYTES = 1024  # less was meant in another unit


def shortage_of(problem: Problem, budget_bytes: int, fsdp2_bytes: int) -> Shortage:
    """fsdp2_bytes: the peak of FSDP2's own schedule."""
    memo = Memo(problem)
    least = least_peak(memo)
    peak = simulated(memo, least).peak
    helps = [Help(Remedy.BUDGET, least.peak_bytes), *_changes(problem, least.peak_bytes)]
    if budget_bytes < LEAST_PLAUSIBLE_BYTES:
        helps.insert(0, Help(Remedy.UNIT, least.peak_bytes))
    return Shortage(
        budget_bytes=budget_bytes,
        least_bytes=least.peak_bytes,
        fsdp2_bytes=fsdp2_bytes,
        direction=peak.direction,
        step=peak.step,
        owners=peak.owners[:OWNERS],
        helps=tuple(helps),
        names=tuple((group.id, group.fqn) for group in problem.groups),
    )


def may_fit(problem: Problem) -> bool:
    """The leanest choices fit the budget: a fraction of what `shortage_of` takes."""
    if problem.budget_bytes is None:
        return True
    memo = Memo(checked(problem))
    context = SearchContext(memo, problem.budget_bytes)
    return candidate(context, lean_choices(memo)) is not None


def least_peak(memo: Memo) -> Candidate:
    """The leanest choices, placed within the smallest budget that they were found to fit."""
    choices = lean_choices(memo)
    best = candidate(SearchContext(memo, 1 << 62), choices)
    assert best is not None  # no budget
    low = 0
    for _ in range(HALVINGS):
        found = candidate(SearchContext(memo, (low + best.peak_bytes) // 2), choices)
        low, best = ((low + best.peak_bytes) // 2, best) if found is None else (low, found)
    return best


def _changes(problem: Problem, least_bytes: int) -> list[Help]:
    """What lowers the least peak, most first."""
    found = []
    for remedy, groups, changed in _variants(problem):
        peak_bytes = least_peak(Memo(changed)).peak_bytes
        if peak_bytes < least_bytes:
            found.append(Help(remedy, peak_bytes, groups))
    return sorted(found, key=lambda one: (one.peak_bytes, one.remedy))


def _variants(problem: Problem) -> Iterator[tuple[Remedy, tuple[int, ...], Problem]]:
    halved = replace(
        problem,
        forward=tuple(map(_half, problem.forward)),
        backward=tuple(map(_half, problem.backward)),
        recompute=tuple(replace(o, saved_bytes=o.saved_bytes // 2) for o in problem.recompute),
        offloads=tuple(map(_half_offload, problem.offloads)),
    )
    yield Remedy.HALF_THE_BATCH, (), halved
    held = tuple(g.id for g in problem.groups if g.reshard is False or g.keep_across)
    if held:
        groups = tuple(
            replace(g, reshard=True, keep_across=False) if g.id in held else g
            for g in problem.groups
        )
        yield Remedy.RESHARD, held, replace(problem, groups=groups)
    if not problem.sync_each and problem.micro_steps > 1:
        yield Remedy.SYNC_EACH, (), replace(problem, sync_each=True)


def _half(region: Region) -> Region:
    return replace(
        region,
        activation_bytes=region.activation_bytes // 2,
        temporary_bytes=region.temporary_bytes // 2,
    )


def _half_offload(offload: Offload) -> Offload:
    return replace(offload, bytes=offload.bytes // 2, us=offload.us / 2)
