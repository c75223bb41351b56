"""Choices placed as FSDP2 would place them, and the full simulation of what is placed.

What is placed here is not held to any budget: it is what others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from graphshard.planner.choices import Choices
from graphshard.planner.events import turns
from graphshard.planner.fsdp2 import fsdp2_placement
from graphshard.planner.kit import Kit
from graphshard.planner.problem import Problem
from graphshard.planner.score import Bench, Candidate, score, start_bytes
from graphshard.planner.simulate import Simulation, report
from graphshard.planner.stage import Placement, Stage, assemble, stage_of

Place: TypeAlias = Callable[[Problem, Stage], Placement]


def placed_as(kit: Kit, choices: Choices, place: Place = fsdp2_placement) -> Candidate:
    """`choices` with every direction placed by `place`."""
    bench = Bench(kit, 0)
    found = []
    for direction in kit.problem.directions:
        stages = [stage_of(kit, choices, direction, turn) for turn, _ in turns(kit.problem)]
        starts = start_bytes(bench, choices, direction)
        found.append(score(bench, stages, starts, place(kit.problem, stages[0])))
    return Candidate(choices, tuple(found))


def simulated(kit: Kit, chosen: Candidate) -> Simulation:
    """Everything about `chosen`. Its `step_us` and `peak_bytes` are those of `chosen`."""
    pairs = list(zip(kit.problem.directions, chosen.directions, strict=True))
    programs = {
        turn: [
            assemble(stage_of(kit, chosen.choices, direction, turn), scored.placement)
            for direction, scored in pairs
        ]
        for turn, _ in turns(kit.problem)
    }
    return report(kit.problem, chosen.choices, programs)
