"""Plans on disk, so that a second launch does not search again.

In: a problem as it is priced (graph structure, costs, settings, budget; no rank, device index or
name of a process group is in it). Out: the plan that was found for it before, by this version of
torch and these sources of the planner, if it contradicts nothing and suits the problem (`check`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from graphshard.errors import PlanError
from graphshard.files import cache
from graphshard.planner.checked import checked
from graphshard.planner.choices import Choices
from graphshard.planner.problem import Problem
from graphshard.planner.separate_group import reductions_apart
from graphshard.planner.simulate import simulated_as
from graphshard.schedule.plan import GroupInfo, Plan
from graphshard.schedule.steps import to_json


def key_of(
    problem: Problem,
    baseline: Problem | None,
    groups: tuple[GroupInfo, ...],
    torch_version: str,
    start: Choices | None = None,
) -> str:
    """SHA-256 over all that a plan depends on. The budget, the costs and the user's settings are
    in the problem."""
    text = to_json([_planner(), torch_version, groups, problem, baseline, start])
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _planner() -> str:
    """Changes with every version of graphshard that may plan otherwise."""
    here = Path(__file__).parents[1]
    others = ["files/cache.py", "schedule/plan.py", "schedule/steps.py"]
    files = [*(here / name for name in others), *sorted((here / "planner").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def load(key: str, name: str, check: Callable[[Plan], None] = lambda plan: None) -> Plan | None:
    """The plan under `key`, with the name of this graph; None if there is none that can be used.

    check: raises PlanError for a plan that does not suit.
    """

    def use(text: str) -> Plan:
        plan = Plan.from_json(text)
        check(plan)
        return replace(plan, name=name)

    return cache.load(key, cache.Kind.PLAN, use)


def save(key: str, plan: Plan) -> None:
    cache.save(key, cache.Kind.PLAN, plan.to_json(indent=None))


def check(plan: Plan, problem: Problem, groups: tuple[GroupInfo, ...], torch_version: str) -> None:
    """Raises PlanError (GS603) unless `plan` is one of `problem`: what it is simulated to take, to
    hold and to send is what it says."""
    own, asked = (
        tuple(replace(g, between_micro_steps=False, offloaded_bytes=0) for g in x)
        for x in (plan.groups, groups)
    )
    if own != asked or plan.torch_version != torch_version:
        raise PlanError("GS603", "it is of other groups, or of another torch")
    offered = {option.activation for option in problem.recompute}
    if not offered.issuperset(plan.recompute.activations):
        raise PlanError("GS603", "it computes again what the graph does not have")
    away = {option.activation for option in problem.offload_options}
    if not away.issuperset(plan.recompute.offloaded):
        raise PlanError("GS603", "it offloads what the graph does not have")
    if plan.reduces_apart != problem.reduces_apart:
        if not plan.reduces_apart or not problem.may_reduce_apart:
            raise PlanError("GS603", "it reduces on other process groups")
        problem = reductions_apart(problem)
    if len(plan.schedules) != len(problem.directions):
        raise PlanError("GS603", "it has another number of directions")
    found = simulated_as(checked(problem), plan)
    ours = plan.estimate.ours
    pairs = (
        (found.step_us, ours.step_time_us),
        (found.exposed_us, ours.exposed_us),
        (found.peak.bytes, ours.peak_bytes),
    )
    if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-3) for pair in pairs):
        raise PlanError("GS603", "its schedule does not take what it says")
