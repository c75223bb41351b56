"""The planner: a problem in, the schedule of each direction out.

The budget is the problem's own or, without one, the peak of FSDP2's own schedule; it holds in the
simulation. What is not faster than FSDP2's schedule is replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from graphshard.errors import InfeasibleBudget
from graphshard.plan import Estimate, Schedule
from graphshard.planner.events import Turn, turns
from graphshard.planner.fsdp2 import fsdp2_choices, fsdp2_placement
from graphshard.planner.problem import Problem
from graphshard.planner.score import Bench, Candidate, Scored, score, start_bytes
from graphshard.planner.search import search
from graphshard.planner.stage import Placement, Stage, assemble, stage_of

# Halvings when the least feasible peak is looked for: 1 % of FSDP2's peak.
HALVINGS = 7


@dataclass(frozen=True, slots=True)
class Planned:
    """The chosen schedules, and what they and FSDP2's own come to in the simulation.

    recompute: indices of the problem's options that are taken.
    """

    schedules: tuple[Schedule, ...]
    estimate: Estimate
    recompute: tuple[int, ...] = ()


def plan_step(problem: Problem, baseline: Problem | None = None) -> Planned:
    """The best schedules found. Raises InfeasibleBudget (GS601) if none fits the budget.

    baseline: what FSDP2 would run, where that is not `problem` (activations are computed again).
    """
    own = fsdp2(problem)
    budget = own.peak_bytes if problem.budget_bytes is None else problem.budget_bytes
    best = search(Bench(problem, budget), [own.choices])
    if own.peak_bytes <= budget and (best is None or own.us <= best.us):
        best = own
    if best is None:
        raise InfeasibleBudget("GS601", _why(problem, budget, own.peak_bytes))
    theirs = own if baseline is None else fsdp2(baseline)
    estimate = Estimate(best.us, best.peak_bytes, budget, theirs.us, theirs.peak_bytes)
    return Planned(tuple(_schedules(problem, best)), estimate, best.choices.recompute)


def fsdp2(
    problem: Problem, place: Callable[[Problem, Stage], Placement] = fsdp2_placement
) -> Candidate:
    """FSDP2's own choices and positions, whether they fit or not. place: its positions."""
    choices = fsdp2_choices(problem)
    bench = Bench(problem, 0)
    found: list[Scored] = []
    for direction in problem.directions:
        stages = [stage_of(problem, choices, direction, turn) for turn, _ in turns(problem)]
        starts = start_bytes(bench, choices, direction)
        found.append(score(bench, stages, starts, place(problem, stages[0])))
    return Candidate(choices, tuple(found))


def _schedules(problem: Problem, chosen: Candidate) -> Iterable[Schedule]:
    for direction, scored in zip(problem.directions, chosen.directions, strict=True):
        stage = stage_of(problem, chosen.choices, direction, Turn())
        events = assemble(stage, scored.placement)
        yield Schedule(direction, tuple(event.step for event in events))


def _why(problem: Problem, budget: int, own_bytes: int) -> str:
    """The least peak that the search reaches, by halving between the budget and FSDP2's peak."""
    low, high = budget, max(budget, own_bytes)
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        fits = search(Bench(problem, middle), [fsdp2_choices(problem)]) is not None
        low, high = (low, middle) if fits else (middle, high)
    return (
        f"no schedule fits a memory budget of {budget:,} bytes; about {high:,} bytes are needed "
        f"(FSDP2's own schedule: {own_bytes:,}); give a larger budget, more ranks or checkpointing"
    )
