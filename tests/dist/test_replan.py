"""`options={"replan_after": n}`: times are measured and agreed on, the plan is made again."""

from typing import Any

import pytest
from models import CASES
from parity import assert_equal, build, train
from pool import Ctx, Pool

import graphshard
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import StepKind

pytestmark = pytest.mark.dist


def measured_of(model: Any) -> Measured:
    (found,) = graphshard.measurements(model)
    assert found is not None
    compared = found.plan.compare(found.measured)
    assert compared.regions
    assert compared.collectives
    assert compared.step_time.measured_us == found.measured.step_time_us
    assert "predicted us" in str(found)
    return found.measured


def planned_again(ctx: Ctx, name: str) -> dict[str, Any]:
    case = CASES[name]
    expected = train(build(case, ctx), case, ctx, 12)
    model = build(case, ctx)
    options = {"fallback": "error", "memory_budget": "1GiB", "replan_after": 8}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    assert_equal(expected, train(model, case, ctx, 12))
    measured = measured_of(model)
    (plan,) = graphshard.plans(model)
    gathers = [s for s in measured.forward if s.step.kind is StepKind.GATHER_ISSUE]
    assert measured.num_steps == 7
    assert all(s.us >= 0 and s.exposed_us >= 0 for s in measured.forward)
    assert [s.comm_us for s in gathers if not (s.comm_us or 0) > 0] == []
    assert {g for s in gathers for g in s.step.groups} == {g.id for g in plan.groups}
    return {"json": plan.to_json(), "measured": measured, "summary": plan.summary()}


@pytest.mark.alone
@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_a_plan_from_measured_times_changes_no_bit(pool: Pool, name: str) -> None:
    first, second = pool.run(2, planned_again, name, timeout_s=250)
    assert first == second
    # What was measured is what the new plan was made from.
    predicted_us, measured_us = first["summary"].step_time_us, first["measured"].step_time_us
    assert 0.2 * measured_us < predicted_us < 2 * measured_us
