"""Closing the loop: time a few steps of a graph, agree on the times, plan again, go on.

Capture and passes are not repeated: what changes is the order of the emitted code. Every rank
does this at the same forward of the same group, so that all of them change over together.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch.distributed as dist

from graphshard import measured as times
from graphshard.emit import emit, with_marks
from graphshard.ir import Program
from graphshard.measured import Issued, Lap, Measured
from graphshard.pipeline import apply, plan_with_costs
from graphshard.planner.observed import observed, travelling
from graphshard.planner.problem import Problem
from graphshard.runtime.agree import Ballot, told
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.run import Body
from graphshard.step_plan import Direction, Plan, Reshard, Step, StepKind

logger = logging.getLogger(__name__)

FEWEST_STEPS = 1


@dataclass(slots=True, eq=False)
class Feedback:
    """One graph pair that is watched from its second step on and planned again after `after`.

    placed: the program as it was before its plan was applied; used up when it is planned again.
    adopt: takes the new program, its plan, and what that was made from.
    """

    placed: Program
    problem: Problem
    reshard: Reshard
    program: Program
    plan: Plan
    bodies: Mapping[Direction, Body]
    groups: list[LiveGroup]
    ballots: list[Ballot]
    after: int
    adopt: Callable[[Program, Plan, Problem, Measured], None]
    _stretches: dict[Direction, tuple[Step, ...]] = field(default_factory=dict)
    _done: bool = False

    def before_forward(self) -> None:
        """Called before every forward of the graph."""
        if self._done:
            return
        forwards = self.groups[0].counters.forwards
        if forwards >= self.after:
            self._done = True
            self._plan_again(forwards)
        elif forwards >= 1 and not self._stretches and len(self.bodies) == 2:
            self._watch()

    def _watch(self) -> None:
        schedules = {schedule.direction: schedule for schedule in self.plan.schedules}
        for direction, module in self.program.by_direction.items():
            marked, steps = with_marks(module, schedules[direction], cuts(self.problem, direction))
            self._stretches[direction] = steps
            self.bodies[direction].call = emit(marked)
            self.bodies[direction].watched = True

    def _plan_again(self, forwards: int) -> None:
        measured = self._agreed(forwards)
        if measured is not None:
            problem = observed(self.problem, measured)
            self.plan = replace(
                plan_with_costs(self.placed, problem, self.reshard),
                recompute=self.plan.recompute,
                priced_on=self.plan.priced_on,
            )
            self.program = apply(self.placed, self.plan)
            self.adopt(self.program, self.plan, problem, measured)
        for direction, module in self.program.by_direction.items():
            body = self.bodies[direction]
            body.call, body.watched = emit(module), False
            body.watches.clear()

    def _agreed(self, forwards: int) -> Measured | None:
        """The same on all ranks; None if they ran different plans or too few steps."""
        own = {d: [w.lap() for w in self.bodies[d].watches] for d in self._stretches}
        plan = hashlib.sha256(self.plan.to_json().encode()).hexdigest()
        key = f"measured after {forwards} forwards of {self.groups[0].fqn}"
        said = told(self.ballots, key, f"{plan}\n{times.to_json(own)}")
        plans, laps = zip(*(text.split("\n", 1) for text in said), strict=True)
        if len(set(plans)) > 1:
            logger.warning("%s: not planned again: ranks run different plans", self.plan.name)
            return None
        return self._combined([times.from_json(text) for text in laps])

    def _combined(self, ranks: list[dict[Direction, list[Lap]]]) -> Measured | None:
        count = min((len(laps) for own in ranks for laps in own.values()), default=0)
        if count < FEWEST_STEPS:
            if dist.get_rank() == 0:
                logger.warning("%s: not planned again: no step was complete", self.plan.name)
            return None
        laps = {d: [own[d][-count:] for own in ranks] for d in self._stretches}
        found = {
            direction: times.combine(steps, laps[direction], issued(self.problem, direction, steps))
            for direction, steps in self._stretches.items()
        }
        step_us, exposed_us = times.whole(list(self._stretches.values()), list(laps.values()))
        backward = found.get(Direction.BACKWARD, ())
        return Measured(count, step_us, exposed_us, found[Direction.FORWARD], backward)


def cuts(problem: Problem, direction: Direction) -> frozenset[int]:
    """The ops at which the problem's regions start."""
    return frozenset(accumulate(r.num_ops for r in problem.regions(direction)))


def issued(problem: Problem, direction: Direction, steps: Sequence[Step]) -> dict[int, Issued]:
    """What is known of the collective of each issuing stretch."""
    found = {}
    for index, step in enumerate(steps):
        if step.group is None or step.kind not in (StepKind.GATHER_ISSUE, StepKind.REDUCE_ISSUE):
            continue
        group = problem.groups[step.group]
        gathers = step.kind is StepKind.GATHER_ISSUE
        lane = group.lane_in(direction) if gathers else group.reduce_lane
        found[index] = Issued(lane, sum(t.us for _, t in travelling(problem, direction, step)))
    return found
