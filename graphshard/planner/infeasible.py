"""What to say when no schedule fits the budget: how much is missing, who holds it, what would help.

Every change that is named was planned with: its number is what the least peak would become.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.planner.compare import simulated
from graphshard.planner.memo import Memo
from graphshard.planner.moves import lean_choices
from graphshard.planner.problem import Claim, Problem, Region
from graphshard.planner.score import Candidate, SearchContext, candidate
from graphshard.schedule.plan import Direction, Step

HALVINGS = 10  # 0.1 % of the distance between the first bounds
OWNERS = 4
LEAST_PLAUSIBLE_BYTES = 1024  # less was meant in another unit


def why_infeasible(problem: Problem, budget_bytes: int, own_bytes: int) -> str:
    """The text of GS601. own_bytes: the peak of FSDP2's own schedule."""
    memo = Memo(problem)
    least = least_peak(memo)
    peak = simulated(memo, least).peak
    owners = "; ".join(owner_text(problem, claim) for claim in peak.owners[:OWNERS])
    helps = [
        *_unit(budget_bytes),
        f"a budget of {least.peak_bytes:,} bytes",
        *_changes(problem, least.peak_bytes),
    ]
    return (
        f"no schedule fits a memory budget of {budget_bytes:,} bytes; the least feasible peak is "
        f"{least.peak_bytes:,} bytes (FSDP2's own schedule: {own_bytes:,} bytes), "
        f"{moment_text(problem, peak.direction, peak.step)}: {owners}. "
        f"What would help: {'; '.join(helps)}"
    )


def _unit(budget_bytes: int) -> Iterator[str]:
    if budget_bytes < LEAST_PLAUSIBLE_BYTES:
        yield f"memory_budget='{budget_bytes}GiB', since a number without a unit means bytes"


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


def _changes(problem: Problem, least_bytes: int) -> Iterator[str]:
    """What lowers the least peak, most first."""
    rows = []
    for name, changed in _variants(problem):
        peak_bytes = least_peak(Memo(changed)).peak_bytes
        if peak_bytes < least_bytes:
            rows.append((peak_bytes, name))
    for peak_bytes, name in sorted(rows):
        less_bytes = least_bytes - peak_bytes
        yield f"{name}: least peak {peak_bytes:,} bytes ({less_bytes:,} bytes less)"


def _variants(problem: Problem) -> Iterator[tuple[str, Problem]]:
    halved = replace(
        problem,
        forward=tuple(map(_half, problem.forward)),
        backward=tuple(map(_half, problem.backward)),
        recompute=tuple(replace(o, saved_bytes=o.saved_bytes // 2) for o in problem.recompute),
    )
    yield "half the batch", halved
    held = [g for g in problem.groups if g.reshard is False or g.keep_across]
    if held:
        freed = (replace(g, reshard=True, keep_across=False) for g in problem.groups)
        names = ", ".join(g.fqn for g in held[:OWNERS]) + (", ..." if held[OWNERS:] else "")
        groups = tuple(
            new if old in held else old for old, new in zip(problem.groups, freed, strict=True)
        )
        yield f"reshard_after_forward=True on {names}", replace(problem, groups=groups)
    if not problem.sync_each and problem.micro_steps > 1:
        yield "gradient sync in every micro-step", replace(problem, sync_each=True)


def _half(region: Region) -> Region:
    return replace(
        region,
        activation_bytes=region.activation_bytes // 2,
        temporary_bytes=region.temporary_bytes // 2,
    )


def owner_text(problem: Problem, claim: Claim) -> str:
    """ "1,024 bytes of Activation" or "64 bytes of All Gather (layers.0)"."""
    whose = "" if claim.group is None else f" ({problem.groups[claim.group].fqn or 'the root'})"
    return f"{claim.bytes:,} bytes of {claim.category}{whose}"


def moment_text(problem: Problem, direction: Direction, step: Step) -> str:
    if step.group is None:
        return f"in {direction}, during compute ops {step.start} to {step.stop - 1}"
    fqn = problem.groups[step.group].fqn or "the root"
    return f"in {direction}, at the {step.kind.replace('_', ' ')} of {fqn}"
