"""Running graphs under a stopwatch: marks in, times of all ranks out, and the unmarked code back.

In goes a `Executable`, one graph pair with its plan. Between `watch` and `unwatch` every run of it
leaves a run; `combined` makes one `Measured` of the runs of all ranks. What is computed stays the
same: only calls of `run.mark` are added between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from torch import fx

from graphshard.codegen.aten import emit_ops
from graphshard.codegen.emit import emit, with_marks
from graphshard.codegen.regions import Artifacts, compile_missing, linked, sliced
from graphshard.graph.program import Program
from graphshard.options import Options
from graphshard.planner.observed import travelling
from graphshard.planner.problem import Problem
from graphshard.runtime.run import Body
from graphshard.schedule import measured as times
from graphshard.schedule.measured import DirectionRun, Issued, Measured
from graphshard.schedule.plan import Direction, Plan, Step
from graphshard.schedule.steps import ISSUES

Runs: TypeAlias = dict[Direction, list[DirectionRun]]
Segments: TypeAlias = dict[Direction, tuple[Step, ...]]


@dataclass(slots=True, eq=False)
class Executable:
    """One graph pair as it runs now, for those FSDP roots that call it together.

    artifacts: its compiled regions; None if ops run one by one. segments: what its marks separate;
    empty if unwatched. asked: directions of which AOTAutograd has the code, of all who share it.
    """

    program: Program
    plan: Plan
    problem: Problem
    bodies: dict[Direction, Body]
    options: Options
    artifacts: Artifacts | None = None
    segments: Segments = field(default_factory=dict)
    asked: set[Direction] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """AOTAutograd has asked for the code of both directions, for backward in the first step."""
        return len(self.asked) == len(self.program.by_direction)


def executables(
    running: Executable, modules: Mapping[Direction, fx.GraphModule]
) -> dict[Direction, Callable[[list[Any]], Any]]:
    """The boxed callables of a graph pair, marked or not. Raises what the compiler raises."""
    artifacts = running.artifacts
    if artifacts is None:
        return {direction: emit_ops(module) for direction, module in modules.items()}
    slices = {d: sliced(module, cuts(running.problem, d)) for d, module in modules.items()}
    compile_missing(list(slices.values()), artifacts)
    return {direction: emit(linked(part, artifacts)) for direction, part in slices.items()}


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
    for direction, call in executables(running, marked).items():
        running.bodies[direction].call = call
        running.bodies[direction].watched = True


def unwatch(running: Executable) -> None:
    """Back to the code of `running.program`, without marks; the runs are gone."""
    running.segments.clear()
    for direction, call in executables(running, running.program.by_direction).items():
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
    count = min((len(runs) for own in ranks for runs in own.values()), default=0)
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


def cuts(problem: Problem, direction: Direction) -> frozenset[int]:
    """The ops at which the problem's regions start."""
    return frozenset(accumulate(r.num_ops for r in problem.regions(direction)))


def issued(problem: Problem, direction: Direction, steps: Sequence[Step]) -> dict[int, Issued]:
    """What is known of the collective of each issuing segment."""
    found = {}
    for index, step in enumerate(steps):
        if step.group is None or step.kind not in ISSUES:
            continue
        group = problem.groups[step.group]
        lane = group.lane_of(step.kind, direction)
        found[index] = Issued(lane, sum(t.us for _, t in travelling(problem, direction, step)))
    return found
