"""Choices placed as FSDP2 would place them, and the full simulation of what is placed.

What is placed here is not held to any budget: it is what others are compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from graphshard.planner.choices import Choices
from graphshard.planner.events import (
    Event,
    MicroStep,
    given_gradients,
    micro_steps_of,
    start_allocations,
    total_bytes,
)
from graphshard.planner.fsdp2 import fsdp2_placement
from graphshard.planner.memo import Memo
from graphshard.planner.problem import Problem
from graphshard.planner.score import Candidate, SearchContext, score, start_bytes
from graphshard.planner.simulate import Played, Simulation, owners_at, play, report
from graphshard.planner.stage import Placement, Stage, assemble, stage_of, stages_of
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.forecast import CollectiveTime, Forecast, StepTime
from graphshard.schedule.plan import Category, Direction, Schedule

Place: TypeAlias = Callable[[Problem, Stage], Placement]


def placed_as(memo: Memo, choices: Choices, place: Place = fsdp2_placement) -> Candidate:
    """`choices` with every direction placed by `place`."""
    context = SearchContext(memo, 0)
    found = []
    for direction in memo.problem.directions:
        stages = stages_of(memo, choices, direction)
        starts = start_bytes(context, choices, direction)
        found.append(score(context, stages, starts, place(memo.problem, stages[0])))
    return Candidate(choices, tuple(found))


def simulated(memo: Memo, chosen: Candidate) -> Simulation:
    """Everything about `chosen`. Its `step_us` and `peak_bytes` are those of `chosen`."""
    pairs = list(zip(memo.problem.directions, chosen.directions, strict=True))
    programs = {
        micro: [
            assemble(stage_of(memo, chosen.choices, direction, micro), scored.placement)
            for direction, scored in pairs
        ]
        for micro, _ in micro_steps_of(memo.problem)
    }
    return report(memo.problem, chosen.choices, programs)


def forecasts(memo: Memo, chosen: Candidate) -> tuple[Forecast, ...]:
    """What each step of the schedules of `chosen` is expected to take, one entry per direction."""
    found = []
    start = start_allocations(memo.problem, chosen.choices, MicroStep())
    for direction, events in _events(memo, chosen):
        if direction is Direction.BACKWARD:
            start += given_gradients(memo.problem)
        run = play(events, total_bytes(start), memo.problem.lanes)
        found.append(_forecast(events, run, start))
        start = tuple(owners_at(start, events, len(events)))
    return tuple(found)


def schedules(memo: Memo, chosen: Candidate) -> tuple[Schedule, ...]:
    """The steps of `chosen`, one schedule per direction."""
    return tuple(
        Schedule(direction, tuple(event.step for event in events))
        for direction, events in _events(memo, chosen)
    )


def _events(memo: Memo, chosen: Candidate) -> Iterator[tuple[Direction, list[Event]]]:
    for direction, scored in zip(memo.problem.directions, chosen.directions, strict=True):
        stage = stage_of(memo, chosen.choices, direction, MicroStep())
        yield direction, assemble(stage, scored.placement)


def _forecast(events: list[Event], run: Played, start: Sequence[Allocation]) -> Forecast:
    steps, collectives = [], []
    for index, (event, reached_us) in enumerate(zip(events, run.reached_us, strict=True)):
        waits = event.job >= 0 and event.lane < 0
        exposed_us = max(0.0, run.finished_us[event.job] - reached_us) if waits else 0.0
        steps.append(StepTime(reached_us, event.us, exposed_us))
        if event.lane >= 0:
            start_us, end_us = run.started_us[event.job], run.finished_us[event.job]
            collectives.append(CollectiveTime(index, event.lane, start_us, end_us))
    return Forecast(tuple(steps), tuple(collectives), _memory(start, events))


def _memory(
    start: Sequence[Allocation], events: list[Event]
) -> tuple[tuple[Category, tuple[int, ...]], ...]:
    """Bytes alive during each event, by category."""
    held: Counter[Category] = Counter()
    columns: dict[Category, list[int]] = {category: [] for category in Category}
    for allocation in start:
        held[allocation.category] += allocation.bytes
    for event in events:
        for allocation in event.takes:
            held[allocation.category] += allocation.bytes
        inside = held.copy()
        for allocation in event.briefly:
            inside[allocation.category] += allocation.bytes
        for category, column in columns.items():
            column.append(inside[category])
        for allocation in event.gives:
            held[allocation.category] -= allocation.bytes
    return tuple((category, tuple(sizes)) for category, sizes in columns.items() if any(sizes))
