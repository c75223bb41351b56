"""torch.profiler shows each collective of a step once, under the plan's name."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from models import of_depth
from parity import build, train
from pool import Ctx, Pool
from torch.profiler import ProfilerActivity, profile
from traces import checked

import graphshard
from graphshard.schedule.plan import Plan
from graphshard.schedule.steps import ISSUE_OF, ISSUES, Direction, direction_range_name, range_name
from graphshard.view.diff import diff_measured
from graphshard.view.profiled import measured_of_trace
from graphshard.view.trace import merged

pytestmark = pytest.mark.dist

STEPS = 3
WAITS = tuple(ISSUE_OF)


def planned_names(plan: Plan, kinds: tuple[Any, ...]) -> Counter[str]:
    fqns = {g.id: g.fqn for g in plan.groups}
    return Counter(
        range_name(step.kind, [fqns[g] for g in step.groups], step.params)
        for schedule in plan.schedules
        for step in schedule.of_kind(*kinds)
        if not step.kept
    )


def recorded(ctx: Ctx, name: str, folder: str, options: dict[str, Any]) -> None:
    case = of_depth(name, 2)
    model = build(case, ctx)
    model.compile(backend="graphshard", options={"fallback": "error", **options})
    train(model, case, ctx, 1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(model, case, ctx, STEPS)
    file = Path(folder) / f"rank{ctx.rank}.json"
    found.export_chrome_trace(str(file))
    trace = json.loads(file.read_text())
    (plan,) = graphshard.plans(model)
    names = Counter(
        event["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith("graphshard::")
    )
    for direction in Direction:
        assert names.pop(direction_range_name(direction)) == STEPS
    expected = planned_names(plan, ISSUES)
    assert expected
    seen = {n: c for n, c in names.items() if "_wait " not in n}
    assert seen == {n: STEPS * count for n, count in expected.items()}
    assert names.keys() - seen.keys() == planned_names(plan, WAITS).keys()
    measured = measured_of_trace(plan, trace)
    assert measured.num_steps == STEPS
    assert measured.exposed_us < measured.step_time_us
    assert [s.step for s in measured.forward] == list(plan.forward.steps)
    assert sum(s.us + s.exposed_us for s in measured.forward) > 0
    found_diff = diff_measured(plan, measured)
    change_us = math.fsum(part.change_us for part in found_diff.contributions)
    assert math.isclose(change_us, found_diff.step_time_us.change or 0.0)
    both = checked(merged(plan, trace))["traceEvents"]  # with all of `trace`
    predicted = Counter(e["name"] for e in both if e.get("cat") == "collective")
    assert predicted == expected + theirs(plan)
    first = min(e["pid"] for e in both if e.get("cat") == "collective")
    own = [e for e in both if e["pid"] == first]
    exposed_us = math.fsum(e["dur"] for e in own if e.get("cat") == "exposed")
    assert math.isclose(exposed_us, plan.estimate.exposed_us, abs_tol=1e-6)
    carried = sum(e["args"]["bytes"] for e in own if e.get("cat") == "collective")
    assert carried == sum(entry.size_bytes for entry in plan.collective_signature) > 0


def theirs(plan: Plan) -> Counter[str]:
    """FSDP2's process in the same file."""
    assert plan.fsdp2 is not None
    fqns = {g.id: g.fqn for g in plan.groups}
    return Counter(
        range_name(step.kind, [fqns[g] for g in step.groups], step.params)
        for schedule in plan.fsdp2.schedules
        for step in schedule.of_kind(*ISSUES)
        if not step.kept
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("llama", {"reshard": "auto", "memory_budget": "1GiB"}), ("gpt_tied", {})],
)
def test_a_profile_has_the_plans_names(
    pool: Pool, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    pool.run(2, recorded, name, str(tmp_path), options)
