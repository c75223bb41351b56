"""Closing the loop: time a few steps of a graph, agree on the times, plan again, go on.

Capture and passes are not repeated: what changes is the order of the emitted code. Every rank
does this at the same forward of the same group, so that all of them change over together.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from graphshard.compiler.instrument import Executable, combined, samples_of, unwatch, watch
from graphshard.compiler.planning import apply, plan_with_costs
from graphshard.files.information import printable
from graphshard.graph.program import Program, copied
from graphshard.planner.observed import observed
from graphshard.planner.separate_group import reductions_apart
from graphshard.runtime.agree import told
from graphshard.runtime.live import LiveGroup, ballots_of, part_reductions
from graphshard.schedule import measured as times
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan, Reshard

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replan:
    """One graph pair that is watched from its second step on and planned again after `after`.

    placed: the program as it was before its plan was applied. adopt: takes the plan that ran until
    then and what it was measured at; `running` has the new one.
    """

    running: Executable
    placed: Program
    reshard: Reshard
    after: int
    adopt: Callable[[Plan, Measured], None]
    done: bool = False

    def before_forward(self, groups: Sequence[LiveGroup]) -> None:
        """Called before every forward of `groups`, the first that ran the graph, until `done`."""
        forwards = groups[0].counters.forwards
        if forwards >= self.after:
            self.done = True
            self._plan_again(forwards, groups)
        elif forwards >= 1 and not self.running.segments and self.running.is_complete:
            watch(self.running)

    def _plan_again(self, forwards: int, groups: Sequence[LiveGroup]) -> None:
        running, before = self.running, self.running.plan
        measured = self._agreed(forwards, groups)
        if measured is not None:
            problem = observed(running.problem, measured)
            plan = replace(
                plan_with_costs(self.placed, problem, self.reshard),
                recompute=running.plan.recompute,
                priced_on=running.plan.priced_on,
            )
            if plan.reduces_apart and not problem.reduces_apart:
                problem = reductions_apart(problem)
                part_reductions(groups)
            # A copy: others who share the graph may still plan it again.
            running.program, running.plan = apply(copied(self.placed), plan), plan
            running.problem = problem
            self.adopt(before, measured)
        unwatch(running)

    def _agreed(self, forwards: int, groups: Sequence[LiveGroup]) -> Measured | None:
        """The same on all ranks; None if they ran different plans or too few steps."""
        running = self.running
        name = running.plan.name
        plan = hashlib.sha256(running.plan.to_json().encode()).hexdigest()
        key = f"measured after {forwards} forwards of {printable(groups[0].fqn)}"
        said = told(ballots_of(groups), key, f"{plan}\n{times.to_json(samples_of(running))}")
        plans, texts = zip(*(text.split("\n", 1) for text in said), strict=True)
        if len(set(plans)) > 1:
            logger.warning("%s: not planned again: ranks run different plans", name)
            return None
        runs = [times.from_json(text) for text in texts]
        measured = combined(running.problem, running.segments, runs)
        if measured is None and dist.get_rank() == 0:
            logger.warning("%s: not planned again: no step was complete", name)
        return measured
