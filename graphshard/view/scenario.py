"""One run of a step on a common clock: of this plan or FSDP2's, predicted, or as it was measured.

In comes a `Plan`; out come its scenarios. Times count in microseconds from the start of the
forward; the backward begins when it ends. Traces are drawn and plans compared from these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.schedule.estimate import Category
from graphshard.schedule.forecast import CollectiveTime, Forecast, StepTime
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Baseline, Direction, Plan, Schedule, Step, StepKind
from graphshard.schedule.signature import SignatureEntry
from graphshard.schedule.steps import ISSUE_OF, ISSUES, StepIdentity, range_name
from graphshard.view.timeline import computing_groups

OURS, FSDP2, MEASURED = "graphshard, predicted", "FSDP2, predicted", "graphshard, measured"


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """One step on the compute lane: it waits `exposed_us`, then works for `us`.

    where: what is computed, as "forward layers.3"; or the name of the communication step.
    memory: bytes alive during it by category; empty if nobody knows.
    """

    direction: Direction
    step: Step
    where: str
    start_us: float
    exposed_us: float
    us: float
    memory: tuple[tuple[Category, int], ...] = ()

    @property
    def end_us(self) -> float:
        return self.start_us + self.exposed_us + self.us


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective on lane `lane`.

    issue, wait: places in `Scenario.works` (wait: None if nothing waits for it).
    """

    entry: SignatureEntry
    name: str
    lane: int
    issue: int
    wait: int | None
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything on one clock. works follow one another without a gap."""

    title: str
    works: tuple[ComputeSpan, ...]
    collectives: tuple[Carried, ...]

    @property
    def us(self) -> float:
        return self.works[-1].end_us if self.works else 0.0

    @property
    def exposed_us(self) -> float:
        return sum(work.exposed_us for work in self.works)


def scenarios(plan: Plan) -> tuple[Scenario, ...]:
    """This plan, FSDP2's and what was measured, as far as `plan` has them."""
    found = []
    if plan.forecasts:
        found.append(predicted(plan))
    if plan.fsdp2 is not None and plan.fsdp2.forecasts:
        forward, *backward = plan.fsdp2.schedules
        theirs = replace(
            plan,
            forward=forward,
            backward=backward[0] if backward else None,
            forecasts=plan.fsdp2.forecasts,
        )
        found.append(predicted(theirs, FSDP2))
    if plan.measured is not None:
        found.append(measured(plan, plan.measured))
    return tuple(found)


def predicted(plan: Plan, title: str = OURS) -> Scenario:
    """What the cost model expects. Raises ValueError if the plan was made without it."""
    if not plan.forecasts:
        raise ValueError(f"{plan.name} was made without the cost model: it predicts no times")
    return _scenario(plan, title, list(zip(plan.schedules, plan.forecasts, strict=True)))


def measured(plan: Plan, found: Measured) -> Scenario:
    """Medians one after another; a collective starts when it was issued and its lane was free.

    One whose end was not seen ends with its wait, at the latest.
    """
    course = measured_course(plan, found)
    pairs = list(zip(course.schedules, course.forecasts, strict=True))
    return _scenario(plan, MEASURED, pairs)


def measured_course(plan: Plan, found: Measured) -> Baseline:
    """What ran, in its order, with the times of `measured`."""
    schedules, forecasts = [], []
    for schedule in plan.schedules:
        segments = found.of(schedule.direction)
        own = Schedule(schedule.direction, tuple(segment.step for segment in segments))
        schedules.append(own)
        forecasts.append(_laid_out(schedule.direction, segments, _lanes(plan)))
    return Baseline(tuple(schedules), tuple(forecasts))


def _laid_out(
    direction: Direction,
    segments: Sequence[Segment],
    lanes: dict[tuple[Direction, StepIdentity], int],
) -> Forecast:
    steps: list[StepTime] = []
    for segment in segments:
        start_us = steps[-1].end_us if steps else 0.0
        steps.append(StepTime(start_us, segment.us, segment.exposed_us))
    waits = waits_of([segment.step for segment in segments])
    collectives: list[CollectiveTime] = []
    free_at: dict[int, float] = {}
    for index, segment in enumerate(segments):
        step = segment.step
        if step.kind not in ISSUES or step.kept:
            continue
        lane = lanes.get((direction, step.identity), 0)
        start_us = max(steps[index].end_us, free_at.get(lane, 0.0))
        if segment.comm_us is not None:
            end_us = start_us + segment.comm_us
        else:
            wait = steps[waits[index]] if index in waits else steps[-1]
            end_us = max(start_us, wait.start_us + wait.exposed_us)
        free_at[lane] = end_us
        collectives.append(CollectiveTime(index, lane, start_us, end_us))
    return Forecast(tuple(steps), tuple(collectives))


def waits_of(steps: Sequence[Step]) -> dict[int, int]:
    """Place of an issue -> place of its wait."""
    waits = {s.identity: i for i, s in enumerate(steps) if s.kind in ISSUE_OF}
    keys = ((i, s.identity) for i, s in enumerate(steps) if s.kind in ISSUES)
    return {index: waits[key] for index, key in keys if key in waits}


def _lanes(plan: Plan) -> dict[tuple[Direction, StepIdentity], int]:
    return {
        (schedule.direction, schedule.steps[c.issue].identity): c.lane
        for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=False)
        for c in forecast.collectives
    }


def _scenario(plan: Plan, title: str, pairs: Sequence[tuple[Schedule, Forecast]]) -> Scenario:
    works: list[ComputeSpan] = []
    collectives: list[Carried] = []
    names = {group.id: group.fqn for group in plan.groups}
    start_us = 0.0
    for schedule, forecast in pairs:
        collectives += _carried(plan, schedule, forecast, len(works), start_us)
        works += _works(schedule, forecast, names, start_us)
        start_us += forecast.us
    return Scenario(title, tuple(works), tuple(collectives))


def _works(
    schedule: Schedule, forecast: Forecast, names: dict[int, str], start_us: float
) -> Iterator[ComputeSpan]:
    owners = computing_groups(schedule.steps)
    for index, (step, time) in enumerate(zip(schedule.steps, forecast.steps, strict=True)):
        if step.kind is StepKind.COMPUTE:
            group = owners[index]
            owner = [] if group is None else [names[group]]
            where = " ".join([str(schedule.direction), *owner])
        else:
            where = _name(step, names)
        yield ComputeSpan(
            direction=schedule.direction,
            step=step,
            where=where,
            start_us=start_us + time.start_us,
            exposed_us=time.exposed_us,
            us=time.work_us,
            memory=tuple((category, sizes[index]) for category, sizes in forecast.memory),
        )


def _carried(
    plan: Plan, schedule: Schedule, forecast: Forecast, first: int, start_us: float
) -> Iterator[Carried]:
    """first: the place of the schedule's first step among all works."""
    names = {group.id: group.fqn for group in plan.groups}
    waits = waits_of(schedule.steps)
    for found in forecast.collectives:
        step = schedule.steps[found.issue]
        yield Carried(
            entry=plan.entry(schedule.direction, step),
            name=_name(step, names),
            lane=found.lane,
            issue=first + found.issue,
            wait=first + waits[found.issue] if found.issue in waits else None,
            start_us=start_us + found.start_us,
            end_us=start_us + found.end_us,
        )


def _name(step: Step, names: dict[int, str]) -> str:
    return range_name(step.kind, [names[group] for group in step.groups], step.params)
