"""The plan of one captured graph: its groups and the schedule of each direction.

A `Plan` is what the planner writes, the emitter compiles, the verifier checks and the viewer
draws. It is a pure value: no tensors, no process groups, standard library only, so that a plan
file opens anywhere in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from graphshard.errors import FileError
from graphshard.files.decode import DecodeError, Positive, decode, parse
from graphshard.files.reading import read_bytes, shown
from graphshard.files.writing import save_text
from graphshard.schedule import signature
from graphshard.schedule.check import (
    course_faults,
    figure_faults,
    group_faults,
    step_faults,
)
from graphshard.schedule.comparison import Comparison, compare
from graphshard.schedule.estimate import Allocation as Allocation
from graphshard.schedule.estimate import Category as Category
from graphshard.schedule.estimate import Estimate as Estimate
from graphshard.schedule.estimate import Figures as Figures
from graphshard.schedule.estimate import Moment as Moment
from graphshard.schedule.estimate import OptimizerKind as OptimizerKind
from graphshard.schedule.estimate import OptimizerStep as OptimizerStep
from graphshard.schedule.estimate import Spent as Spent
from graphshard.schedule.forecast import Forecast
from graphshard.schedule.groups import NOTHING_RECOMPUTED, size_bytes
from graphshard.schedule.groups import Activation as Activation
from graphshard.schedule.groups import GroupInfo as GroupInfo
from graphshard.schedule.groups import Origin as Origin
from graphshard.schedule.groups import ParamInfo as ParamInfo
from graphshard.schedule.groups import Recomputed as Recomputed
from graphshard.schedule.groups import Reshard as Reshard
from graphshard.schedule.measured import Measured
from graphshard.schedule.reasons import NotEarlier, Reason, group_of
from graphshard.schedule.residency import Residency, gathered_bytes_by_step, residency
from graphshard.schedule.signature import CollectiveSignature, SignatureEntry
from graphshard.schedule.steps import COLLECTIVES, to_json
from graphshard.schedule.steps import Direction as Direction
from graphshard.schedule.steps import Lane as Lane
from graphshard.schedule.steps import Schedule as Schedule
from graphshard.schedule.steps import Step as Step
from graphshard.schedule.steps import StepKind as StepKind
from graphshard.schedule.summary import Fsdp2Summary as Fsdp2Summary
from graphshard.schedule.summary import Summary as Summary
from graphshard.schedule.summary import fsdp2_summary

SCHEMA_VERSION = 9


@dataclass(frozen=True, slots=True)
class PricedOn:
    """What the costs of a plan are from: a preset (calibrated or not), ranks on one node.

    fused: compute was priced as a compiler fuses it, not op by op.
    """

    machine: str
    ranks_per_node: Positive
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another order of the same step: its schedules, and a forecast of each."""

    schedules: tuple[Schedule, ...]
    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A group of the model that a graph does not run. cause: "" if another graph may, or none has
    reached it so far; else why it is run by eager FSDP2."""

    fqn: str
    cause: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Groups and schedules of one captured graph; `backward` is None under no_grad.

    estimate: time and memory, predicted, FSDP2's own beside them. forecasts: what each step is
    expected to take, one per schedule. fsdp2: what FSDP2
    itself would run, with the forecasts of that. measured: what this plan took where it ran.
    recompute: what is computed again in backward, or held by the host until then, because the
    planner chose so. reduces_apart: it also chose a process group of their own for reductions.
    left_out: the other groups of the model; None: not known.
    """

    name: str
    torch_version: str
    groups: tuple[GroupInfo, ...]
    forward: Schedule
    backward: Schedule | None
    estimate: Estimate
    recompute: Recomputed = NOTHING_RECOMPUTED
    reasons: tuple[Reason, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    priced_on: PricedOn | None = None
    fsdp2: Baseline | None = None
    measured: Measured | None = None
    reduces_apart: bool = False
    left_out: tuple[LeftOut, ...] | None = None

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def across(self) -> tuple[int, ...]:
        """The groups that stay gathered between micro-steps."""
        return tuple(group.id for group in self.groups if group.between_micro_steps)

    @property
    def collective_signature(self) -> CollectiveSignature:
        """The collectives in the order of issue, forward first: what all ranks must share."""
        by_id = {g.id: g for g in self.groups}
        return tuple(
            found
            for s in self.schedules
            for step in s.steps
            for found in _entries(s.direction, step, by_id)
        )

    def entry(self, direction: Direction, issue: Step) -> SignatureEntry:
        """What the collective that step `issue` starts is on the wire, or what a copy copies."""
        by_id = {g.id: g for g in self.groups}
        return _entry(direction, issue, [by_id[group] for group in issue.groups])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the collective signature; equal on ranks that may run together."""
        return signature.fingerprint(self.collective_signature)

    def on_fsdp2_groups(self) -> Plan:
        """The same with FSDP2's process groups alone: for ranks that do not run one plan."""
        return replace(
            self,
            forward=_off_node(self.forward),
            backward=None if self.backward is None else _off_node(self.backward),
            reduces_apart=False,
        )

    def residency(self) -> tuple[Residency, ...]:
        """When each group is gathered, over the forward steps followed by the backward steps."""
        return tuple(residency(self.schedules))

    def gathered_bytes_by_step(self) -> list[int]:
        """See `graphshard.schedule.residency`."""
        return gathered_bytes_by_step(self.groups, self.schedules)

    def gathered_peak_bytes(self) -> int:
        """Most bytes of gathered parameters alive at once (buckets in flight included)."""
        return max(self.gathered_bytes_by_step(), default=0)

    def summary(self) -> Summary:
        """Graphs, groups, collectives per step; time and memory as predicted, FSDP2's beside."""
        estimate = self.estimate
        return Summary(
            name=self.name,
            graphs=len(self.schedules),
            groups=len(self.groups),
            params=sum(len(g.params) for g in self.groups),
            all_gathers=sum(s.num_all_gathers for s in self.schedules),
            reduce_scatters=sum(s.num_reduce_scatters for s in self.schedules),
            all_reduces=sum(s.num_all_reduces for s in self.schedules),
            collectives=sum(s.num_collectives for s in self.schedules),
            gathered_peak_bytes=self.gathered_peak_bytes(),
            fingerprint=self.fingerprint,
            step_time_us=estimate.step_time_us,
            whole_step_us=estimate.whole_step_us,
            exposed_us=estimate.exposed_us,
            peak_bytes=estimate.peak_bytes,
            peak_by_category=dict(estimate.ours.peak_by_category),
            limit=estimate.limit,
            budget_bytes=estimate.budget_bytes,
            lower_bound_us=estimate.lower_bound_us,
            gap=estimate.gap,
            fsdp2=fsdp2_summary(estimate),
            optimizer=estimate.optimizer,
            stragglers=estimate.stragglers,
        )

    def compare(self, measured: Measured) -> Comparison:
        """What was predicted against what was measured, region by region and collective by
        collective. `graphshard.measurements` has what was measured.

        Raises ValueError if the plan has no forecasts, or the regions differ.
        """
        pairs = zip(self.schedules, self.forecasts, strict=False)
        return compare(list(pairs), measured)

    def formula(self, figure: str) -> Any:
        """`"step_time"` (microseconds) or `"peak_bytes"` as a formula to print and to evaluate.

        A `graphshard.cost.symbolic.Formula`; see `graphshard.cost.whatif` for what it leaves out.
        Raises ValueError for another figure, or a plan without costs.
        """
        # Costs are made of plans. Here is only where users look for a formula.
        return import_module("graphshard.cost.plan_formula").formula_of(self, figure)

    def __repr__(self) -> str:
        return str(_view("brief").brief_text(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline, with FSDP2's own figures."""
        return str(_view("brief").brief_html(self))

    @overload
    def to_html(self) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """The page of `graphshard view`, as text or (`path`) as a file.

        Raises FileError (GS1203) if the file cannot be written.
        """
        page: str = _view("html").render(self)
        if path is None:
            return page
        save_text(Path(path), page)
        return None

    def save(self, path: str | Path) -> None:
        """Write the plan file. Raises FileError (GS1203) if that is not possible."""
        save_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Raises FileError that names it: GS1203 if it cannot be read, GS1204 if
        it is too large, GS1202 if it holds something else."""
        path = Path(path)
        raw = read_bytes(path)
        try:
            return cls.from_data(parse(raw))
        except DecodeError as error:
            raise FileError("GS1202", f"{shown(path)} is not a plan: {error}") from error
        except FileError as error:
            raise FileError(error.code, f"{shown(path)} is not a plan: {error.message}") from error

    def to_json(self, *, indent: int | None = 1) -> str:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return to_json({"schema": SCHEMA_VERSION, **own}, indent)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote. Raises FileError (GS1202, a ValueError) that names the place
        in a broken file; whoever reads a plan may trust it.
        """
        try:
            return Plan.from_data(parse(text))
        except DecodeError as error:
            raise FileError("GS1202", f"broken plan: {error}") from error

    @staticmethod
    def from_data(data: object) -> Plan:
        """As `from_json`, of what the text holds."""
        try:
            if not isinstance(data, dict) or data.get("schema") != SCHEMA_VERSION:
                found = data.get("schema") if isinstance(data, dict) else type(data).__name__
                raise DecodeError(f"expected a plan of schema {SCHEMA_VERSION}, found {found!r}")
            plan: Plan = decode(Plan, {k: v for k, v in data.items() if k != "schema"})
        except DecodeError as error:
            raise FileError("GS1202", f"broken plan: {error}") from error
        fault = next(faults_of(plan), None)
        if fault is not None:
            raise FileError("GS1202", f"broken plan: {fault}")
        return plan


def load_plan(path: str | Path) -> Plan:
    """The plan of a plan file, as `Plan.load`."""
    return Plan.load(path)


def _view(name: str) -> Any:
    """Views are made of plans. Here is only where users look for them."""
    return import_module(f"graphshard.view.{name}")


def faults_of(plan: Plan) -> Iterator[str]:
    """What contradicts itself in a plan, each as "place: what is wrong"."""
    yield from group_faults(plan.groups)
    groups = {group.id: group for group in plan.groups}
    both = ("forward", "backward")
    yield from course_faults(groups, both, plan.schedules, plan.forecasts)
    if plan.fsdp2 is not None:
        places, theirs = [f"schedules[{n}]" for n in range(2)], plan.fsdp2
        for text in course_faults(groups, places, theirs.schedules, theirs.forecasts):
            yield f"fsdp2.{text}"
    if plan.measured is not None:
        for direction in Direction:
            steps = [segment.step for segment in plan.measured.of(direction)]
            yield from step_faults(groups, steps, f"measured.{direction}")
    for text in figure_faults(groups, plan.schedules, plan.estimate.ours):
        yield f"estimate.ours.{text}"
    theirs_of = plan.schedules if plan.fsdp2 is None else plan.fsdp2.schedules
    for text in figure_faults(groups, theirs_of, plan.estimate.fsdp2):
        yield f"estimate.fsdp2.{text}"
    for index, reason in enumerate(plan.reasons):
        busy = reason.busy if isinstance(reason, NotEarlier) else ()
        about = group_of(reason)
        for group in busy if about is None else (about, *busy):
            if group not in groups:
                yield f"reasons[{index}]: there is no group {group}"


def _off_node(schedule: Schedule) -> Schedule:
    return replace(schedule, steps=tuple(replace(s, on_node=False) for s in schedule.steps))


def _entries(
    direction: Direction, step: Step, by_id: Mapping[int, GroupInfo]
) -> Iterator[SignatureEntry]:
    groups = [by_id[number] for number in step.groups]
    if step.kind in COLLECTIVES and not step.kept:
        yield _entry(direction, step, groups)


def _entry(direction: Direction, step: Step, groups: list[GroupInfo]) -> SignatureEntry:
    if step.is_copy:  # activations have dtypes of their own
        dtypes = ["bytes"]
    elif step.kind is StepKind.GATHER_ISSUE:
        dtypes = [
            g.params[p].wire_dtype for g in groups for p in step.params or range(len(g.params))
        ]
    else:
        dtypes = [g.reduce_dtype for g in groups]
    uniform = len(dict.fromkeys(dtypes)) == 1
    dtype = dtypes[0] if uniform else "bytes"
    fqns, size = " + ".join(g.fqn for g in groups), size_bytes(step, groups)
    return SignatureEntry(str(direction), str(step.lane), fqns, dtype, size, step.on_node)


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
