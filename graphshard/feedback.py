"""Closing the loop: time a few steps of a graph, agree on the times, plan again, go on.

Capture and passes are not repeated: what changes is the order of the emitted code. Every rank
does this at the same forward of the same group, so that all of them change over together.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from graphshard import measured as times
from graphshard.ir import Program
from graphshard.measured import Measured
from graphshard.pipeline import apply, plan_with_costs
from graphshard.planner.apart import reductions_apart
from graphshard.planner.observed import observed
from graphshard.planner.problem import Problem
from graphshard.runtime.agree import Ballot, told
from graphshard.runtime.live import part_reductions
from graphshard.step_plan import Plan, Reshard
from graphshard.watch import Running, combined, laps_of, unwatch, watch

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Feedback:
    """One graph pair that is watched from its second step on and planned again after `after`.

    placed: the program as it was before its plan was applied; used up when it is planned again.
    adopt: takes the new program, its plan, and what that was made from.
    """

    running: Running
    placed: Program
    reshard: Reshard
    ballots: list[Ballot]
    after: int
    adopt: Callable[[Program, Plan, Problem, Measured], None]
    done: bool = False

    def before_forward(self) -> None:
        """Called before every forward of the graph until `done`."""
        forwards = self.running.groups[0].counters.forwards
        if forwards >= self.after:
            self.done = True
            self._plan_again(forwards)
        elif forwards >= 1 and not self.running.stretches and self.running.is_complete:
            watch(self.running)

    def _plan_again(self, forwards: int) -> None:
        measured, running = self._agreed(forwards), self.running
        if measured is not None:
            problem = observed(running.problem, measured)
            plan = replace(
                plan_with_costs(self.placed, problem, self.reshard),
                recompute=running.plan.recompute,
                priced_on=running.plan.priced_on,
            )
            if plan.reduces_apart and not problem.reduces_apart:
                problem = reductions_apart(problem)
                part_reductions(running.groups)
            running.program, running.plan = apply(self.placed, plan), plan
            running.problem = problem
            self.adopt(running.program, plan, problem, measured)
        unwatch(running)

    def _agreed(self, forwards: int) -> Measured | None:
        """The same on all ranks; None if they ran different plans or too few steps."""
        running = self.running
        name = running.plan.name
        plan = hashlib.sha256(running.plan.to_json().encode()).hexdigest()
        key = f"measured after {forwards} forwards of {running.groups[0].fqn}"
        said = told(self.ballots, key, f"{plan}\n{times.to_json(laps_of(running))}")
        plans, texts = zip(*(text.split("\n", 1) for text in said), strict=True)
        if len(set(plans)) > 1:
            logger.warning("%s: not planned again: ranks run different plans", name)
            return None
        laps = [times.from_json(text) for text in texts]
        measured = combined(running.problem, running.stretches, laps)
        if measured is None and dist.get_rank() == 0:
            logger.warning("%s: not planned again: no step was complete", name)
        return measured
