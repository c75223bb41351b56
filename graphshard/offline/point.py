"""What an offline plan is asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphshard.cost.machine import Machine
from graphshard.errors import InfeasibleBudget
from graphshard.offline.target import Sizes
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Point:
    """What to plan for. sizes: of the inputs, by the names that the building function knows.

    fused: compute is priced as a compiler fuses it, not op by op.
    """

    world_size: int
    ranks_per_node: int
    machine: Machine
    policy: PlanningPolicy
    sizes: Sizes = ()
    fused: bool = False

    @property
    def in_parts(self) -> bool:
        """As `PlanningInputs.in_parts`."""
        return self.policy.regroup and self.world_size > 1

    @property
    def job_machine(self) -> Machine:
        """The machine, with as many ranks on a node as the job has."""
        return replace(self.machine, ranks_per_node=self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Answer:
    """plan: None if nothing fits the point's budget; `infeasible` then says why."""

    point: Point
    plan: Plan | None
    infeasible: InfeasibleBudget | None = None

    def fitting(self) -> Plan:
        """The plan. Raises InfeasibleBudget if nothing fits."""
        if self.plan is None:
            assert self.infeasible is not None
            raise self.infeasible
        return self.plan
