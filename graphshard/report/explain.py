"""What graphshard did: the plans of a model, what they were measured at, and a short report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from graphshard.capture.root_state import CompiledPlan, RootState, root_states_under
from graphshard.compiler.executable import Executable
from graphshard.files.configuration import Given
from graphshard.files.information import printable
from graphshard.fsdp2 import fsdp_groups, states_under
from graphshard.fsdp2.describe import name_of
from graphshard.planner.problem import Problem
from graphshard.planner.room import with_room
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import LeftOut, Plan, Summary
from graphshard.view.comparison import comparison_text
from graphshard.view.gain import Gained, gain_lines
from graphshard.view.recomputed import recomputed_text
from graphshard.view.text import collectives_text


def plans(model: nn.Module) -> list[Plan]:
    """The plans that are compiled for `model` (wrapped by torch.compile or not), oldest first.

    With what more memory would buy (`Estimate.room`) once `explain` has asked that: it takes up to
    two more plans.
    """
    root_states = root_states_under(model)
    return [_told(compiled, root_states) for compiled in _compiled(root_states)]


def _told(compiled: CompiledPlan, root_states: Sequence[RootState]) -> Plan:
    """With the groups that its graph leaves out, and what more memory would buy if known."""
    plan = compiled.plan
    inside = {group.fqn for group in plan.groups}
    left_out = (
        LeftOut(name, {**root_state.outside, **root_state.reasons}.get(name, ""))
        for root_state in root_states
        for name in (name_of(live.fsdp) for live in root_state.groups)
        if name not in inside
    )
    estimate = replace(plan.estimate, room=tuple(compiled.room) or plan.estimate.room)
    return replace(plan, left_out=tuple(left_out), estimate=estimate)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a plan was measured at, the same on all ranks; `str()` of it is a table for people.

    plan: the plan that ran. If `replan_after` measured it, another one took its place then; what
    tunes itself ends with the measurement of the plan that stays.
    """

    plan: Plan
    measured: Measured

    def __str__(self) -> str:
        return comparison_text(self.plan, self.plan.compare(self.measured))


def measurements(model: nn.Module) -> list[Measurement | None]:
    """The last measurement behind each plan of `plans(model)`, in the same order.

    None: nothing was measured. `graphshard.profile` measures, and what tunes itself.
    """
    return [_measurement(compiled) for compiled in compiled_plans(model)]


def _measurement(compiled: CompiledPlan) -> Measurement | None:
    if compiled.plan.measured is not None:
        return Measurement(compiled.plan, compiled.plan.measured)
    if compiled.before is None or compiled.measured is None:
        return None
    return Measurement(compiled.before, compiled.measured)


@dataclass(frozen=True, slots=True)
class Report:
    """What runs in a graph, what does not, and why.

    plans: summaries of the compiled plans (see `Plan.summary`), oldest first.
    captured, present: groups whose forward has run in a graph, and all groups of the model.
    unseen: groups of which no compiled call has run yet.
    reasons: group FQN -> why it runs through eager FSDP2.
    code: for each plan its name, the emitted forward and the emitted backward.
    regions: name of a plan -> its regions of compute and how many of them are distinct; empty where
    ops run one by one.
    options: those that were given, with where they stand; code goes over the environment, that over
    a file.
    gained: over FSDP2's own schedule, by each plan.
    recomputed: name of a plan -> what its backward computes again, and whether that replaces the
    user's checkpoints; empty where nothing is.
    ahead: runs of graphs of which the first all-gather is issued while another graph computes.
    """

    plans: tuple[Summary, ...]
    captured: int
    present: int
    reasons: dict[str, str]
    code: tuple[tuple[str, str, str], ...]
    regions: dict[str, tuple[int, int]]
    unseen: int = 0
    options: tuple[tuple[str, Given], ...] = ()
    gained: tuple[Gained, ...] = ()
    ahead: int = 0
    recomputed: dict[str, str] = field(default_factory=dict)

    @property
    def graphs(self) -> int:
        """Compiled graphs, forward and backward counted apart."""
        return sum(plan.graphs for plan in self.plans)

    def __str__(self) -> str:
        if self.present == 0:
            return (
                "no fully_shard group in this model, and nothing to plan without one: call\n"
                "torch.distributed.fsdp.fully_shard on its blocks, then on the model"
            )
        if self.unseen == self.present:
            return _not_run(self.present)
        lines = list(self._headline())
        lines += [
            f"graphs       {self.graphs} (forward and backward counted apart)",
            f"groups       {self.captured} of {self.present} run in a graph",
        ]
        lines += [
            f"collectives  {collectives_text(plan)} per step of {plan.name}" for plan in self.plans
        ]
        lines += [
            f"regions      {count} of compute in {name}, compiled from {distinct} distinct ones"
            for name, (count, distinct) in self.regions.items()
        ]
        lines += [f"recomputed   {text} in {name}" for name, text in self.recomputed.items()]
        if self.ahead:
            lines.append(
                f"ahead        {self.ahead} runs of graphs begin with an all-gather that is issued "
                "while the graph before computes"
            )
        lines += [f"option       {name}={given}" for name, given in self.options]
        lines += [f"eager        {fqn}: because {reason}" for fqn, reason in self.reasons.items()]
        if self.unseen:
            lines.append(f"not run yet  {self.unseen} groups: no compiled call has reached them")
        return "\n".join(map(printable, lines))

    def _headline(self) -> Iterator[str]:
        """Of each plan; which one, where there are several, and of how much of the model."""
        left = self.present - self.captured
        if left and self.captured:
            yield f"part         {self.captured} of {self.present} groups are planned: what follows"
            yield f"             leaves out the other {left}, and says below why"
        for gained in self.gained:
            if self.gained[1:]:
                yield f"plan         {gained.name}"
            yield from gain_lines(gained)


def explain(model: nn.Module) -> Report:
    """A short report about `model`; `str()` of it is for people, `.code` is the emitted Python."""
    root_states = root_states_under(model)
    compiled = _compiled(root_states)
    counts = _counted(model, root_states)
    return Report(
        plans=tuple(c.plan.summary() for c in compiled),
        captured=counts.captured,
        present=counts.present,
        reasons={k: v for r in root_states for k, v in {**r.outside, **r.reasons}.items()},
        code=tuple((c.plan.name, *_running(c).code) for c in compiled),
        regions={c.plan.name: found for c in compiled if (found := _regions(c)) is not None},
        unseen=counts.unseen,
        options=_options(compiled),
        gained=tuple(g for c in compiled if (g := _gained(c)) is not None),
        recomputed={c.plan.name: text for c in compiled if (text := recomputed_text(c.plan))},
        ahead=sum(root.order.num_expected for r in root_states for root in r.roots if root.order),
    )


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Of the groups of a model: see Report."""

    captured: int
    present: int
    unseen: int


def group_counts(model: nn.Module) -> GroupCounts:
    return _counted(model, root_states_under(model))


def _counted(model: nn.Module, root_states: list[RootState]) -> GroupCounts:
    groups = [live for root_state in root_states for live in root_state.groups]
    seen = {state for root_state in root_states for state in root_state.states}
    new = [state for state in states_under(model) if state not in seen]
    unseen = sum(len(fsdp_groups(state)) for state in new)
    captured = sum(live.counters.forwards > 0 for live in groups)
    return GroupCounts(captured, len(groups) + unseen, unseen)


def _not_run(groups: int) -> str:
    return (
        f"not run yet  {groups} groups, and no compiled call of the model so far: call it once\n"
        '             after `model.compile(backend="graphshard")`. Only `model(...)` is compiled,\n'
        "             not `model.forward(...)` or other methods"
    )


def _gained(compiled: CompiledPlan) -> Gained | None:
    plan, problem = compiled.plan, compiled.problem
    if not isinstance(problem, Problem):
        return None
    own = Gained(plan.name, plan.estimate, measured_of(compiled))
    if not _running(compiled).options.is_planned:
        return own
    if not compiled.room:  # the same problem: what is computed again stays
        compiled.room.extend(with_room(plan.estimate, problem).room)
    if plan.estimate.all_spent is not None:  # what is left unused says it already
        return own
    least = compiled.room[0]
    more_bytes = least.budget_bytes - plan.estimate.budget_bytes
    more_us = least.step_time_us + plan.estimate.optimizer_us
    return replace(own, more_bytes=more_bytes, more_us=more_us)


def measured_of(compiled: CompiledPlan) -> Measured | None:
    """Of the plan that runs, not of one before it."""
    found = _measurement(compiled)
    is_own = found is not None and found.plan.schedules == compiled.plan.schedules
    return found.measured if found is not None and is_own else None


def _options(compiled: list[CompiledPlan]) -> tuple[tuple[str, Given], ...]:
    """Each once, also if several graphs were compiled with it. A value may be a list, say."""
    given = [pair for c in compiled for pair in _running(c).options.given]
    return tuple({f"{name} {value}": (name, value) for name, value in given}.values())


def _regions(compiled: CompiledPlan) -> tuple[int, int] | None:
    artifacts = _running(compiled).artifacts
    return None if artifacts is None else (artifacts.num_regions, len(artifacts.by_key))


def _running(compiled: CompiledPlan) -> Executable:
    assert isinstance(compiled.running, Executable)
    return compiled.running


def compiled_plans(model: nn.Module) -> list[CompiledPlan]:
    """Behind `plans(model)`, in the same order."""
    return _compiled(root_states_under(model))


def _compiled(root_states: list[RootState]) -> list[CompiledPlan]:
    """Each plan once, also if several roots run it together; oldest first."""
    found = {id(c): c for root_state in root_states for c in root_state.plans.values()}
    return list(found.values())
