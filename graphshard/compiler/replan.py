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

from graphshard.compiler import measured_costs
from graphshard.compiler.executable import Executable, stands_between
from graphshard.compiler.instrument import combined, samples_of, unwatch
from graphshard.compiler.measured_costs import Posed
from graphshard.compiler.planning import apply, plan_following, plan_with_costs
from graphshard.errors import InfeasibleBudget, PlanError
from graphshard.files.information import printable
from graphshard.graph.program import Program, copied
from graphshard.planner.observed import observed
from graphshard.planner.problem import Problem
from graphshard.planner.separate_group import reductions_apart
from graphshard.runtime.agree import told
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.live import LiveGroup, give_process_groups
from graphshard.schedule import measured as times
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan, Reshard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """A program in the order of `plan`, which was made for `problem`."""

    program: Program
    plan: Plan
    problem: Problem


@dataclass(slots=True, eq=False, weakref_slot=True)
class Replanner:
    """Measures one graph pair and plans it again.

    placed: the program as it was before its plan was applied. posed: what that plan was made for,
    before anything was measured; None if costs are not kept for later launches. named: a plan of it
    under the names of those who run it. adopt: takes the plan that ran until then and what it was
    measured at; `running` has the one that runs from now on.
    """

    running: Executable
    placed: Program
    posed: Posed | None
    reshard: Reshard
    named: Callable[[Plan], Plan]
    adopt: Callable[[Plan, Measured | None], None]

    @property
    def version(self) -> Version:
        """What runs now."""
        return Version(self.running.program, self.running.plan, self.running.problem)

    def measured(
        self, lead: LiveGroup, ballots: Sequence[Ballot], most: int | None = None
    ) -> Measured | None:
        """What was measured since `watch`, in the last `most` steps; the same on all ranks.

        None if they ran different plans, or no step from beginning to end. All ranks call it before
        the same forward of `lead`.
        """
        running, forwards = self.running, lead.counters.forwards
        name = running.plan.name
        plan = hashlib.sha256(running.plan.to_json(indent=None).encode()).hexdigest()
        key = f"measured after {forwards} forwards of {printable(lead.fqn)}"
        own = {direction: runs[-(most or 0) :] for direction, runs in samples_of(running).items()}
        said = told(ballots, key, f"{plan}\n{times.to_json(own)}")
        plans, texts = zip(*(text.split("\n", 1) for text in said), strict=True)
        if len(set(plans)) > 1:
            logger.warning("%s: not planned again: ranks run different plans", name)
            return None
        runs = [times.from_json(text) for text in texts]
        found = combined(running.problem, running.segments, runs)
        if found is None and dist.get_rank() == 0:
            logger.warning("%s: not planned again: no step was complete", name)
        return found

    def planned(
        self,
        measured: Measured,
        lead: LiveGroup,
        ballots: Sequence[Ballot],
        takes: Callable[[Plan, Problem], bool],
    ) -> Version | None:
        """The lowest rank's plan at these costs; None if it has none, or `takes` does not take it.
        Nothing of `running` changes.

        takes: is asked on that rank alone, about its plan and the problem at these costs. All ranks
        call it before the same forward of `lead`.
        """
        problem, text = self._observed(measured), ""
        if leads(ballots):
            plan = self._best(problem)
            text = plan.to_json(indent=None) if plan is not None and takes(plan, problem) else ""
        key = f"planned after {lead.counters.forwards} forwards of {printable(lead.fqn)}"
        text = told(ballots, key, text)[0]
        return self._made_of(Plan.from_json(text), problem) if text else None

    def _observed(self, measured: Measured) -> Problem:
        """What runs poses at these costs; at those of before if they contradict each other."""
        problem = self.running.problem
        try:
            return observed(problem, measured)
        except PlanError as error:
            logger.warning("%s: not what was measured: %s", self.running.plan.name, error.message)
            return problem

    def _best(self, problem: Problem) -> Plan | None:
        """None if nothing fits the budget, or what runs has no price; the log says so."""
        running = self.running
        if not stands_between(running.plan, problem):  # it cannot be followed (`plan_following`)
            logger.warning("%s: not planned again: its plan is another graph's", running.plan.name)
            return None
        try:
            plan = plan_with_costs(self.placed, problem, self.reshard, start=running.plan)
        except InfeasibleBudget as error:
            logger.warning("%s: not planned again: %s", running.plan.name, error.message)
            return None
        before = running.plan
        return replace(plan, recompute=before.recompute, priced_on=before.priced_on)

    def _made_of(self, plan: Plan, problem: Problem) -> Version:
        plan = replace(plan, name=self.placed.name)
        if plan.reduces_apart and not problem.reduces_apart:
            problem = reductions_apart(problem)
        # A copy: others who share the graph may still plan it again.
        return Version(apply(copied(self.placed), plan), self.named(plan), problem)

    def change_to(
        self,
        version: Version,
        groups: Sequence[LiveGroup],
        measured: Measured | None,
        of: Plan | None = None,
    ) -> None:
        """Run `version` from now on. measured: what `of` was measured at; None: the plan until
        now."""
        running, before = self.running, of or self.running.plan
        give_process_groups(groups, version.plan)
        running.program, running.plan = version.program, version.plan
        running.problem = version.problem
        self.adopt(before, measured)
        unwatch(running)

    def remember(self) -> None:
        """The next launch plans with the costs that what runs was planned with."""
        if self.posed is not None:
            measured_costs.save(self.posed, self.running.problem)

    def follow_order(self, plan: Plan, groups: Sequence[LiveGroup]) -> None:
        """Issue what `plan` does from now on, which was made for a graph of other ops."""
        running = self.running
        own = plan_following(self.placed, running.problem, self.reshard, None, running.plan, plan)
        if own is None:
            logger.warning("%s: cannot issue what %s does", running.plan.name, plan.name)
        else:
            self.change_to(self._made_of(own, running.problem), groups, None)

    def follow(self, plan: Plan, groups: Sequence[LiveGroup]) -> None:
        """Run `plan`, which was made for a graph of the same structure, from now on."""
        if stands_between(plan, self.running.problem):
            self.change_to(self._made_of(plan, self.running.problem), groups, None)
        else:
            self.follow_order(plan, groups)


def leads(ballots: Sequence[Ballot]) -> bool:
    """This is the rank that plans for the others."""
    return all(ballot.rank == ballot.ranks[0] for ballot in ballots)
