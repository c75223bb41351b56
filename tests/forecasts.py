"""Plans with a forecast of each step, and measurements that are what was forecast."""

from plans import group

from graphshard.planner.plan_step import plan_step
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Plan


def planned(problem, name="toy"):
    """The plan of a problem by hand."""
    found = plan_step(problem)
    forward, backward = found.schedules
    groups = tuple(group(g.id, g.fqn, g.gathered_bytes) for g in problem.groups)
    return Plan(
        name, "2.13.0", groups, forward, backward, found.estimate, reasons=found.reasons,
        forecasts=found.forecasts, fsdp2=found.fsdp2,
    )  # fmt: skip


def as_predicted(plan, compute=1.0, comm=1.0):
    """A measurement that is what `plan` predicts, times two factors."""
    found = []
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True):
        comm_us = {c.issue: comm * c.us for c in forecast.collectives}
        found.append(
            tuple(
                Segment(step, compute * time.work_us, time.exposed_us, comm_us.get(index))
                for index, (step, time) in enumerate(
                    zip(schedule.steps, forecast.steps, strict=True)
                )
            )
        )
    return measured(3, *found)


def measured(count, forward, backward):
    both = (*forward, *backward)
    waiting_us = sum(s.exposed_us for s in both)
    return Measured(count, sum(s.us for s in both) + waiting_us, waiting_us, forward, backward)
