"""What runs, as one flat dict of numbers: for TensorBoard, wandb, a Trainer's logs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from graphshard.capture.root_state import CompiledPlan
from graphshard.report.explain import compiled_plans, group_counts, measured_of
from graphshard.schedule.plan import Plan

PREFIX = "graphshard/"


def metrics(model: nn.Module) -> dict[str, float]:
    """Figures of `model` (wrapped by torch.compile or not) on this rank, all keys "graphshard/...".

    groups, groups_in_graphs, plans: counts. Of the plan that was compiled last among those that
    train (or of the last one, if none does): all_gathers, reduce_scatters, all_reduces (over
    replicas) and collective_bytes per step (whole buckets, all ranks' parts); as predicted:
    step_predicted_us (forward and backward, as what is measured), optimizer_predicted_us
    (what comes on top), exposed_predicted_us (compute waits for communication),
    peak_predicted_bytes, budget_bytes, step_fsdp2_predicted_us (FSDP2's own schedule) and gap (with
    the optimizer, to the lower bound, as a share of it). If it was measured (by what tunes itself,
    `replan_after` or `profile`): step_measured_us and exposed_measured_us, the same on all ranks.
    Keys without a value are left out.

    Cheap, and nothing is communicated: it may be called in every step, on any rank.
    """
    counts, compiled = group_counts(model), compiled_plans(model)
    found: dict[str, float] = {
        "groups": counts.present,
        "groups_in_graphs": counts.captured,
        "plans": len(compiled),
    }
    trains = [c for c in compiled if c.plan.backward is not None]
    for last in (trains or compiled)[-1:]:
        found |= dict(_of(last))
    return {PREFIX + key: float(value) for key, value in found.items()}


def _of(compiled: CompiledPlan) -> Iterator[tuple[str, float]]:
    yield from _communicated(compiled.plan)
    estimate = compiled.plan.estimate
    yield "step_predicted_us", estimate.step_time_us
    yield "optimizer_predicted_us", estimate.optimizer_us
    yield "exposed_predicted_us", estimate.exposed_us
    yield "peak_predicted_bytes", estimate.peak_bytes
    yield "budget_bytes", estimate.budget_bytes
    yield "step_fsdp2_predicted_us", estimate.fsdp2.step_time_us
    yield "gap", estimate.gap
    measured = measured_of(compiled)
    if measured is not None:
        yield "step_measured_us", measured.step_time_us
        yield "exposed_measured_us", measured.exposed_us


def _communicated(plan: Plan) -> Iterator[tuple[str, float]]:
    yield "all_gathers", sum(s.num_all_gathers for s in plan.schedules)
    yield "reduce_scatters", sum(s.num_reduce_scatters for s in plan.schedules)
    yield "all_reduces", sum(s.num_all_reduces for s in plan.schedules)
    yield "collective_bytes", sum(entry.size_bytes for entry in plan.collective_signature)
