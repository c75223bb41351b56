"""`options={"memory_budget": ...}`: the plan keeps to it, and no bit changes."""

from typing import Any

import pytest
from models import CASES
from parity import assert_equal, build, train
from pool import Ctx, Pool
from test_memory import watch_gathered

import graphshard

pytestmark = pytest.mark.dist


def planned(ctx: Ctx, name: str, budgets: list[float]) -> list[dict[str, Any]]:
    """Train under each budget (a share of FSDP2's predicted peak; 0: none to speak of)."""
    case, seen = CASES[name], []
    expected = train(build(case, ctx), case, ctx, 3)
    own_bytes = 0
    for share in [0.0, *budgets]:
        budget = int(own_bytes * share) if share else "1000 GiB"
        model = build(case, ctx)
        options = {"fallback": "error", "memory_budget": budget}
        model.compile(backend="graphshard", fullgraph=True, options=options)
        assert_equal(expected, train(model, case, ctx, 3))
        with watch_gathered() as storages:
            case.loss(model, case.batch(3, ctx.rank, ctx.device)).backward()
        plan = graphshard.plans(model)[0]
        summary = plan.summary()
        own_bytes = summary["fsdp2"]["peak_bytes"]
        assert storages.peak_bytes == summary["gathered_peak_bytes"]
        seen.append({**summary, "json": plan.to_json()})
    return seen


@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_a_budget_is_kept_and_changes_no_bit(pool: Pool, name: str) -> None:
    ranks = pool.run(2, planned, name, [1.0, 1.1], timeout_s=250)
    assert [r["json"] for r in ranks[0]] == [r["json"] for r in ranks[1]]
    free, tight, _ = ranks[0]
    for summary in ranks[0]:
        assert summary["peak_bytes"] <= summary["budget_bytes"]
        assert summary["step_time_us"] <= summary["fsdp2"]["step_time_us"]
    assert free["all_gathers"] <= tight["all_gathers"]
    assert tight["peak_bytes"] <= tight["fsdp2"]["peak_bytes"]


def infeasible(ctx: Ctx) -> None:
    case = CASES["llama"]
    model = build(case, ctx)
    model.compile(backend="graphshard", options={"memory_budget": "1KiB"})
    with pytest.raises(Exception, match="GS601: no schedule fits a memory budget of 1,024 bytes"):
        case.loss(model, case.batch(0, ctx.rank, ctx.device))


def test_a_budget_that_nothing_fits_is_an_error(pool: Pool) -> None:
    pool.run(2, infeasible)


def explicit(ctx: Ctx) -> list[int]:
    case = CASES["llama"]
    model = build(case, ctx, reshard_after_forward=True)
    model.compile(backend="graphshard", options={"memory_budget": "1GiB"})
    train(model, case, ctx, 1)
    (plan,) = graphshard.plans(model)
    return [s.num_all_gathers for s in plan.schedules]


def test_an_explicit_reshard_setting_is_binding(pool: Pool) -> None:
    assert pool.run(2, explicit) == [[5, 5], [5, 5]]


def squeezed(ctx: Ctx, name: str) -> list[tuple[float, int]]:
    """Budgets below FSDP2's peak, down to the least feasible one."""
    case, found = CASES[name], []
    expected = train(build(case, ctx), case, ctx, 2)
    own_bytes = 10**12
    for share in (1.0, 1.0, 0.9, 0.8, 0.7):
        model = build(case, ctx)
        options = {"fallback": "error", "memory_budget": int(own_bytes * share)}
        model.compile(backend="graphshard", fullgraph=True, options=options)
        try:
            assert_equal(expected, train(model, case, ctx, 2))
        except Exception as error:
            if "GS601" not in str(error):
                raise
            break
        summary = graphshard.plans(model)[0].summary()
        own_bytes = summary["fsdp2"]["peak_bytes"] if own_bytes == 10**12 else own_bytes
        found.append((share, summary["peak_bytes"], summary["step_time_us"]))
    return found


def test_a_budget_below_that_of_fsdp2_is_kept_by_computing_again(pool: Pool) -> None:
    first, second = pool.run(2, squeezed, "llama", timeout_s=280)
    assert first == second
    assert len(first) > 2
