"""Running graphs under a stopwatch: marks in, times of all ranks out, and the unmarked code back.

In goes an `Executable`, one graph pair with its plan. Between `watch` and `unwatch` every run of it
leaves a run; `combined` makes one `Measured` of the runs of all ranks. What is computed stays the
same: only calls of `run.mark` are added between the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from graphshard.codegen.emit import with_marks
from graphshard.compiler.executable import Executable, Segments, callables_of, cuts
from graphshard.planner.observed import travelling
from graphshard.planner.problem import Problem
from graphshard.schedule import measured as times
from graphshard.schedule.measured import DirectionRun, Issued, Measured
from graphshard.schedule.plan import Direction, Step
from graphshard.schedule.steps import ISSUES

Runs: TypeAlias = dict[Direction, list[DirectionRun]]


class Observer(Protocol):
    """Whoever measures what runs."""

    def before_forward(self, running: Executable) -> None:
        """`running` is about to run forward."""


# Asked at every forward of the context (thread), so that graphs that compile meanwhile are seen.
OBSERVER: ContextVar[Observer | None] = ContextVar("graphshard observer", default=None)


def watch(running: Executable) -> None:
    """Every run from now on leaves a run, until `unwatch`."""
    schedules = {schedule.direction: schedule for schedule in running.plan.schedules}
    marked = {}
    for direction, module in running.program.by_direction.items():
        cut = cuts(running.problem, direction)
        marked[direction], steps = with_marks(module, schedules[direction], cut)
        running.segments[direction] = steps
    for direction, call in callables_of(running, marked).items():
        running.bodies[direction].call = call
        running.bodies[direction].watched = True


def unwatch(running: Executable) -> None:
    """Back to the code of `running.program`, without marks; the runs are gone."""
    running.segments.clear()
    for direction, call in callables_of(running, running.program.by_direction).items():
        body = running.bodies[direction]
        body.call, body.watched = call, False
        body.watches.clear()


def num_samples(running: Executable) -> int:
    """Complete runs since `watch`: of the direction that has fewest."""
    return min((len(running.bodies[d].watches) for d in running.segments), default=0)


def samples_of(running: Executable) -> Runs:
    """The runs of this rank; blocks until the device is done with them."""
    return {d: [w.taken() for w in running.bodies[d].watches] for d in running.segments}


def combined(problem: Problem, segments: Segments, ranks: Sequence[Runs]) -> Measured | None:
    """What all ranks' runs come to, the last ones that all have; None if there is no such run."""
    count = min((len(own.get(d, ())) for own in ranks for d in segments), default=0)
    if count == 0:
        return None
    runs = {d: [own[d][-count:] for own in ranks] for d in segments}
    found = {
        direction: times.combine(steps, runs[direction], issued(problem, direction, steps))
        for direction, steps in segments.items()
    }
    step_us, exposed_us = times.whole(list(segments.values()), list(runs.values()))
    backward = found.get(Direction.BACKWARD, ())
    return Measured(count, step_us, exposed_us, found[Direction.FORWARD], backward)


def issued(problem: Problem, direction: Direction, steps: Sequence[Step]) -> dict[int, Issued]:
    """What is known of the collective, or of the copy, of each issuing segment."""
    found = {}
    copies = {offload.group: offload.us for offload in problem.offloads}
    for index, step in enumerate(steps):
        if step.group is None or step.kind not in ISSUES:
            continue
        if step.is_copy:
            assert problem.host is not None
            found[index] = Issued(problem.host.lane_of(step), copies[step.group])
            continue
        group = problem.groups[step.group]
        lane = group.lane_of(step, direction)
        found[index] = Issued(lane, sum(t.us for _, t in travelling(problem, direction, step)))
    return found
