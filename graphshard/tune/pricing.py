"""What a setting comes to: first by a bound that costs little, then by a plan.

A bound is a step that no schedule of the setting beats, with what it has to compute again to fit
the budget; a plan is made as `graphshard plan` makes one row of a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphshard.compiler.planning import (
    PlanningInputs,
    Posed,
    best_plans,
    plan_as_fsdp2,
    problem_of,
    with_options,
)
from graphshard.compiler.planning_inputs import policy_of
from graphshard.cost.optimizer import DEFAULT, Optimizer
from graphshard.errors import InfeasibleBudget
from graphshard.options import parse_options
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.infeasible import may_fit
from graphshard.planner.problem import Problem
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.problem import PlanningPolicy
from graphshard.pricing.recompute import RecomputeUnit
from graphshard.schedule.plan import Figures, Plan
from graphshard.schedule.setting import Checkpointing, Grouping, Resharding, Scheduling, Setting
from graphshard.tune.aside import side_by_side
from graphshard.tune.merge import Described, Merged, merged, resharded
from graphshard.tune.subject import Subject, World

# A plan may be so much above its lower bound.
NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Bound:
    """step_us: of a whole step. least_bytes: of memory, whatever is computed again."""

    step_us: float
    least_bytes: int


@dataclass(frozen=True, slots=True)
class Priced:
    """plan: None if nothing fits the budget; least_bytes then says what would."""

    setting: Setting
    plan: Plan | None
    least_bytes: int = 0

    @property
    def step_us(self) -> float:
        """Of a whole step, the optimizer included."""
        assert self.plan is not None
        return self.passes_us + self.plan.estimate.optimizer_us

    @property
    def passes_us(self) -> float:
        """Of forward and backward, all micro-steps."""
        return self._figures.step_time_us

    @property
    def exposed_us(self) -> float:
        return self._figures.exposed_us

    @property
    def peak_bytes(self) -> int:
        return self._figures.peak_bytes

    @property
    def _figures(self) -> Figures:
        assert self.plan is not None
        is_own = self.setting.scheduling is Scheduling.FSDP2
        return self.plan.estimate.fsdp2 if is_own else self.plan.estimate.ours


@dataclass(slots=True)
class Pricer:
    """Bounds and plans of settings of one subject; each is made once. near: see NEAR."""

    subject: Subject
    near: float = NEAR
    _problems: dict[Setting, Problem] = field(default_factory=dict)
    _bounds: dict[Setting, Bound] = field(default_factory=dict)
    _priced: dict[Setting, Priced] = field(default_factory=dict)
    _merged: dict[tuple[object, ...], Merged] = field(default_factory=dict)

    @property
    def num_planned(self) -> int:
        return len(self._priced)

    @property
    def tried(self) -> list[Priced]:
        """All that were planned, or did not fit."""
        return list(self._priced.values())

    def rate(self, priced: Priced) -> float:
        """Tokens per second of all ranks."""
        return self.tokens_per_s(priced.setting, priced.step_us)

    def tokens_per_s(self, setting: Setting, step_us: float) -> float:
        """Of all ranks."""
        sizes = dict(setting.sizes)
        own = sizes["batch"] * sizes["seq"] * setting.micro_steps
        ranks = self.subject.data_ranks(setting.world_size, setting.mesh)
        return own * ranks / step_us * 1e6

    def compute_us(self, setting: Setting) -> float:
        """Of a whole step: no bound of it is less."""
        directions = self.subject.costs(setting).by_direction.values()
        return setting.micro_steps * sum(sum(one.us) for one in directions)

    def bound(self, setting: Setting) -> Bound:
        if setting not in self._bounds:
            self._bounds[setting] = self._bound(setting)
        return self._bounds[setting]

    def _bound(self, setting: Setting) -> Bound:
        problem = self._problem(setting)
        units = self._costs(setting).costs.units if self.policy(setting).recompute else ()
        floor = _floor_bytes(problem)
        over = 0 if setting.budget_bytes is None else max(0, floor - setting.budget_bytes)
        again_us, freed = _again(units, over)
        optimizer_us = 0.0 if problem.optimizer is None else problem.optimizer.us
        return Bound(
            lower_bound_us(problem) + setting.micro_steps * again_us + optimizer_us,
            floor - min(freed, over) if over else floor,
        )

    def price(self, setting: Setting) -> Priced:
        if setting not in self._priced:
            self._priced[setting] = self._price(setting)
        return self._priced[setting]

    def price_all(self, settings: Iterable[Setting]) -> None:
        """As `price`, but side by side."""
        new = [one for one in dict.fromkeys(settings) if one not in self._priced]
        works = [partial(self._price, one) for one in new]
        self._priced.update(zip(new, side_by_side(works), strict=True))

    def _price(self, setting: Setting) -> Priced:
        costs, planning = self.inputs(setting)
        if setting.scheduling is Scheduling.FSDP2:
            return Priced(setting, plan_as_fsdp2(costs, self._problem(setting), planning))
        baseline = None
        if setting.checkpointing is Checkpointing.AUTO and self.subject.checkpoints:
            own = replace(setting, checkpointing=Checkpointing.AS_IS)
            baseline = self._problem(own)
        posed = Posed(costs, self._problem(setting), baseline=baseline)
        if not may_fit(with_options(posed, planning)):
            return Priced(setting, None, self.bound(setting).least_bytes)
        try:
            plan, _ = best_plans(posed, planning)
        except InfeasibleBudget as error:
            return Priced(setting, None, error.shortage.least_bytes)
        return Priced(setting, replace(plan, name=self.subject.name))

    def _problem(self, setting: Setting) -> Problem:
        """Micro-steps change nothing else of it."""
        alone = replace(setting, micro_steps=1, sync_each=True)
        if alone not in self._problems:
            self._problems[alone] = problem_of(*self.inputs(alone))
        problem = self._problems[alone]
        if setting.micro_steps == 1:
            return problem
        problem = replace(problem, micro_steps=setting.micro_steps, sync_each=setting.sync_each)
        if not setting.sync_each:
            return problem
        # Only what does not reduce leaves groups gathered for the next micro-step.
        groups = tuple(replace(g, keep_across=g.keep_across is True) for g in problem.groups)
        return replace(problem, groups=groups, has_gradients=True)

    # -- what a plan is made of ----------------------------------------------------------------

    def policy(self, setting: Setting) -> PlanningPolicy:
        return policy_for(self.subject, setting, self.near)

    def inputs(self, setting: Setting) -> tuple[GraphCosts, PlanningInputs]:
        """What is planned from."""
        found, fused = self._costs(setting), self.subject.machines.fused
        settings = tuple(replace(own, exact_sums=not fused) for own in found.settings)
        machine = self.subject.machines.machine
        return found.costs, PlanningInputs(settings, machine, self.policy(setting), fused)

    def _costs(self, setting: Setting) -> Merged:
        key = (
            *(setting.world_size, setting.mesh, setting.grouping, setting.reshard),
            *(setting.sizes, setting.checkpointing, setting.scheduling),
        )
        if key not in self._merged:
            self._merged[key] = self._regrouped(self.subject.costs(setting), setting)
        return self._merged[key]

    def _regrouped(self, costs: GraphCosts, setting: Setting) -> Merged:
        subject, groupings = self.subject, self.subject.groupings
        if groupings is None:
            return _with_groups(costs, subject.own(setting.world_size))
        finest = subject.finest(setting.world_size, setting.mesh)
        order = groupings.params
        if setting.reshard is Resharding.AS_IS:
            assert setting.grouping is Grouping.AS_IS
            own = subject.own(setting.world_size)
            order = tuple(param.fqn for one in own.values() for param in one.info.params)
            found = merged(costs, finest, subject.unions(setting.grouping), order)
            return _with_groups(found.costs, own)
        found = merged(costs, finest, subject.unions(setting.grouping), order)
        per_node = subject.machines.ranks_per_node
        both = [
            resharded(Described(info, own), setting.reshard, per_node)
            for info, own in zip(found.costs.groups, found.settings, strict=True)
        ]
        infos = tuple(one.info for one in both)
        return Merged(replace(found.costs, groups=infos), tuple(one.settings for one in both))


def policy_for(subject: Subject, setting: Setting, near: float = 0.0) -> PlanningPolicy:
    """As of the options that the setting stands for."""
    policy = policy_of(
        parse_options(options_of(subject, setting), elsewhere={}), subject.machines.machine
    )
    if setting.checkpointing is Checkpointing.NONE:
        policy = replace(policy, recompute=False)
    return replace(policy, near=near)


def options_of(subject: Subject, setting: Setting) -> dict[str, object]:
    """`options=` of the backend."""
    without_sync = 1 if setting.sync_each else setting.micro_steps
    optimizer = _optimizer_options(subject.optimizer)
    if setting.scheduling is Scheduling.FSDP2:
        return {"schedule": "fsdp2", "micro_steps": without_sync, **optimizer}
    decides = subject.groupings is None and setting.reshard is Resharding.OPEN
    auto = setting.checkpointing is Checkpointing.AUTO
    return {
        "memory_budget": setting.budget_bytes,
        "recompute": "auto" if auto else "user",
        "offload": "never",
        "micro_steps": without_sync,
        "reshard": "auto" if decides else "fsdp2",
        **optimizer,
    }


def _optimizer_options(optimizer: Optimizer) -> dict[str, object]:
    """Those that are not the backend's own."""
    given = {"optimizer": optimizer.kind.value, "clip": optimizer.clips}
    usual = {"optimizer": DEFAULT.kind.value, "clip": DEFAULT.clips}
    return {name: value for name, value in given.items() if value != usual[name]}


def _with_groups(costs: GraphCosts, world: World) -> Merged:
    """With the groups of a world, in the order of the costs."""
    own = [world[group.fqn] for group in costs.groups]
    infos = tuple(replace(one.info, id=number) for number, one in enumerate(own))
    return Merged(replace(costs, groups=infos), tuple(one.settings for one in own))


def _floor_bytes(problem: Problem) -> int:
    """Below which no schedule's peak is, with nothing computed again: shards, optimizer state, and
    activations at their most."""
    regions = (r for direction in problem.directions for r in problem.regions(direction))
    most = max(r.activation_bytes - r.idle_bytes + r.temporary_bytes for r in regions)
    return sum(held.bytes for held in problem.resident) + most


def _again(units: Sequence[RecomputeUnit], over_bytes: int) -> tuple[float, int]:
    """The least that computing again takes to free `over_bytes`, and what it frees at most: the
    cheapest per byte, and of the last one a part."""
    us, freed = 0.0, 0
    for unit in sorted(units, key=lambda u: u.extra_us / max(1, u.saved_bytes)):
        if freed >= over_bytes:
            break
        share = min(1.0, (over_bytes - freed) / max(1, unit.saved_bytes))
        us += unit.extra_us * share
        freed += unit.saved_bytes
    return us, freed
