"""Just in time: every gather as late, every wait for a reduction as late as costs nothing.

In comes a placed direction, out comes one that is at least as fast within the same budget. First
the gathers walk backwards: each is issued as late as its lane and its first use allow without a
new stall. That frees memory in which reductions may stay in flight longer, so their waits are
placed again; fewer stalls there move the gathers again, until nothing changes.

Late waits hold memory that may buy nothing. `lean` gives it back: every wait as soon as its
reduction is done, where that costs next to nothing. Where an all-reduce follows, the wait is early
in any case (`graphshard.planner.waits`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from graphshard.planner.choices import Choices
from graphshard.planner.fsdp2 import has_lists
from graphshard.planner.memory import profile_of, view_of
from graphshard.planner.placement import UNLIMITED, latest_waits
from graphshard.planner.problem import Problem
from graphshard.planner.score import Scored, SearchContext, score, start_bytes
from graphshard.planner.simulate import play
from graphshard.planner.stage import Placement, Stage, gather_positions, placed, stages_of
from graphshard.planner.waits import earlier_waits, prompt_waits
from graphshard.schedule.plan import Direction

ROUNDS = 4
# So much of the time is nothing beside what a prediction is worth, if memory falls by its share.
SLACK, WORTH = 0.001, 0.05


def just_in_time(
    context: SearchContext, choices: Choices, direction: Direction, scored: Scored
) -> Scored:
    """`scored`, just in time: not slower, and not above the budget unless it was before."""
    problem = context.problem
    stages = stages_of(context.memo, choices, direction)
    starts = start_bytes(context, choices, direction)
    limit = max(context.budget_bytes, scored.peak_bytes)
    for _ in range(ROUNDS):
        before = scored
        if not has_lists(problem, direction):
            scored = _if_good(
                context, stages, starts, limit, scored, _later_gathers(problem, stages, scored)
            )
        waits = _later_waits(problem, stages, starts, limit, scored.placement)
        waits = prompt_waits(problem, stages[-1], waits)
        scored = _if_good(context, stages, starts, limit, scored, waits)
        if scored == before:
            break
    return scored


def lean(context: SearchContext, choices: Choices, direction: Direction, scored: Scored) -> Scored:
    """`scored` with reductions waited for when they are done, if the peak falls by WORTH for it.

    With `Problem.early_waits` it may stay as it is.
    """
    stages = stages_of(context.memo, choices, direction)
    starts = start_bytes(context, choices, direction)
    found = score(
        context, stages, starts, earlier_waits(context.problem, stages[-1], scored.placement)
    )
    cheap = found.us <= scored.us * (1 + SLACK)
    worth = 0.0 if context.problem.early_waits else WORTH
    smaller = found.peak_bytes <= scored.peak_bytes * (1 - worth)
    return found if cheap and smaller else scored


def _if_good(
    context: SearchContext,
    stages: list[Stage],
    starts: list[int],
    limit: int,
    scored: Scored,
    placement: Placement,
) -> Scored:
    found = score(context, stages, starts, placement)
    return found if found.us <= scored.us and found.peak_bytes <= limit else scored


def _later_gathers(problem: Problem, stages: Sequence[Stage], scored: Scored) -> Placement:
    """Each gather at the last position from which it still comes in time.

    Lanes keep their order. The micro-step that has every collective is looked at: forward's first,
    backward's last.
    """
    stage = stages[0 if stages[0].direction is Direction.FORWARD else -1]
    placement = scored.placement
    entries = placed(stage, placement)
    run = play((event for _, event in entries), 0, problem.lanes)
    positions = [at for at, _ in entries]
    reached = [*run.reached_us, run.us]
    awaited = {e.job: t for (_, e), t in zip(entries, run.reached_us, strict=True) if e.lane < 0}
    places = gather_positions(stage)
    number = {id(job.issue): index for index, job in enumerate(stage.gathers)}
    found = list(placement.gathers)
    start_by: dict[int, float] = defaultdict(lambda: float("inf"))
    at_most: dict[int, int] = defaultdict(lambda: stage.end)
    for position, event in reversed(entries):
        if event.lane < 0:
            continue
        start_us, at = run.started_us[event.job], position
        if (index := number.get(id(event))) is not None:
            needed_us = max(awaited[event.job], run.finished_us[event.job])
            start_us = min(needed_us, start_by[event.lane]) - event.comm_us
            low = bisect_left(places, position)
            high = bisect_left(places, min(stage.gathers[index].at, at_most[event.lane] + 1))
            place = bisect_right(
                places, start_us, low, high, key=lambda p: reached[bisect_right(positions, p)]
            )
            found[index] = at = places[max(low, place - 1)]
        start_by[event.lane], at_most[event.lane] = start_us, at
    return replace(placement, gathers=tuple(found))


def _later_waits(
    problem: Problem, stages: list[Stage], starts: list[int], limit: int, placement: Placement
) -> Placement:
    """Every wait for a reduction as late as memory allows, everything else as it is."""
    ready: dict[int, list[int]] = defaultdict(list)
    for reduced in placement.reductions:
        ready[reduced.issue].append(reduced.job)
    profile = profile_of(problem, stages, starts)
    view = view_of(replace(profile, ready=ready), UNLIMITED**2)
    assert view is not None
    positions = view.positions
    steps = [0] * (len(positions) + 1)
    sizes = zip(profile.gathers, profile.gathers[1:], strict=False)
    for issue, job, (low, high) in zip(placement.gathers, stages[0].gathers, sizes, strict=True):
        steps[bisect_right(positions, issue)] += high - low
        steps[bisect_left(positions, job.at)] -= high - low
    flying = list(accumulate(steps[:-1]))
    return replace(placement, reductions=latest_waits(stages[0], view, flying, limit))
