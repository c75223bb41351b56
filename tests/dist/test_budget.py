"""`options={"memory_budget": ...}`: the plan keeps to it, and no bit changes.

Most cases differ in what they ask for alone: they share the trace of a model (`of_trace`), and each
compiles a model of its own from it. Those that do not come last.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from gathered import watch_gathered
from models import CASES as ALL
from models import Case, of_depth, shard_blocks
from parity import assert_equal, backward_twice, build, difference, train
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn
from traced_once import TracedOnce

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.cost import presets
from graphshard.planner import room
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.schedule.plan import Plan, Reshard, StepKind
from graphshard.view.outlook import prospects

pytestmark = pytest.mark.dist

CASES = {**ALL, **{name: of_depth(name, 2) for name in ("llama", "gpt_tied", "gpt_tied_ac")}}
TRACES: defaultdict[str, TracedOnce] = defaultdict(TracedOnce)  # of this rank


def of_trace(ctx: Ctx, case: Case, options: dict[str, Any], **settings: Any) -> nn.Module:
    """A model that is compiled with `options` from the trace of the first one like it."""
    once = TRACES[f"{case.name} {case.build} {settings}"]
    return once.compiled(partial(build, case, ctx, **settings), **options)


def planned(ctx: Ctx, name: str, more: float) -> list[dict[str, Any]]:
    """Train under no budget to speak of, FSDP2's predicted peak, and `more` than that."""
    case, seen = CASES[name], []
    expected = train(build(case, ctx), case, ctx, 3)
    own_bytes = 0
    for limit in ({"memory_budget": "1000 GiB"}, {"schedule": "planned"}, None):
        model = of_trace(ctx, case, limit or {"memory_budget": int(own_bytes * more)})
        assert_equal(expected, train(model, case, ctx, 3))
        with watch_gathered() as storages:
            case.loss(model, case.batch(3, ctx.rank, ctx.device)).backward()
        plan = graphshard.plans(model)[0]
        summary = plan.summary()
        own_bytes = summary.fsdp2.peak_bytes
        assert storages.peak_bytes == summary.gathered_peak_bytes
        seen.append({**asdict(summary), "json": plan.to_json()})
    return seen


@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_a_budget_is_kept_and_changes_no_bit(pool: Pool, name: str) -> None:
    ranks = pool.run(2, planned, name, 1.1, timeout_s=250, keeps_compiled=True)
    assert [r["json"] for r in ranks[0]] == [r["json"] for r in ranks[1]]
    free, tight, _ = ranks[0]
    for summary in ranks[0]:
        assert summary["peak_bytes"] <= summary["budget_bytes"]
        assert summary["step_time_us"] <= summary["fsdp2"]["step_time_us"]
    assert free["all_gathers"] <= tight["all_gathers"]
    assert tight["budget_bytes"] == tight["fsdp2"]["peak_bytes"]


def asked(ctx: Ctx) -> tuple[list[int], list[int], str]:
    """What more memory would buy: in gibibytes, how many rungs were planned, and the plan."""
    case = CASES["llama"]
    model = of_trace(ctx, case, {"compute": "aten"})
    train(model, case, ctx, 2)
    assert graphshard.plans(model)[0].estimate.room == ()
    counts: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            counts[-1] += 1
            return original(*args)

        return made

    with patched(room, "_rung", counted):
        for _ in range(2):
            counts.append(0)
            graphshard.explain(model)
    plan = graphshard.plans(model)[0]
    rungs, own = plan.estimate.room, plan.estimate
    assert all(rung.step_time_us <= own.step_time_us for rung in rungs)
    return [(rung.budget_bytes - own.budget_bytes) >> 30 for rung in rungs], counts, plan.to_json()


def test_explain_asks_once_what_more_memory_would_buy(pool: Pool) -> None:
    """And from then on the plan says it, with a row on its page."""
    (more, counts, text), other = pool.run(2, asked, timeout_s=250, keeps_compiled=True)
    assert more == [1, 10]
    assert counts[0] >= 1
    assert counts[1] == 0
    assert other[2] == text
    whats = [one.what for one in prospects(Plan.from_json(text))]
    assert "10.0 GiB more memory" in whats


def explicit(ctx: Ctx) -> list[bool]:
    case = CASES["llama"]
    model = of_trace(ctx, case, {"memory_budget": "1GiB"}, reshard_after_forward=True)
    train(model, case, ctx, 1)
    (plan,) = graphshard.plans(model)
    return [s.kept for s in plan.forward.of_kind(StepKind.RELEASE)]


def test_an_explicit_reshard_setting_is_binding(pool: Pool) -> None:
    assert pool.run(2, explicit, keeps_compiled=True) == [[False] * 3] * 2


def squeezed(ctx: Ctx) -> list[tuple[float, int]]:
    """Budgets below FSDP2's peak, down to the least feasible one."""
    case, found = of_depth("llama", 3), []
    expected = train(build(case, ctx), case, ctx, 2)
    own_bytes = 10**12
    for share in (1.0, 1.0, 0.9, 0.8, 0.7):
        model = of_trace(ctx, case, {"memory_budget": int(own_bytes * share)})
        try:
            assert_equal(expected, train(model, case, ctx, 2))
        except Exception as error:
            if "GS601" not in str(error):
                raise
            break
        summary = graphshard.plans(model)[0].summary()
        own_bytes = summary.fsdp2.peak_bytes if own_bytes == 10**12 else own_bytes
        found.append((share, summary.peak_bytes, summary.step_time_us))
    return found


def test_a_budget_below_that_of_fsdp2_is_kept_by_computing_again(pool: Pool) -> None:
    first, second = pool.run(2, squeezed, timeout_s=280, keeps_compiled=True)
    assert first == second
    assert len(first) > 2


def every_budget(ctx: Ctx, name: str) -> list[tuple[int, int, int]]:
    """Eight budgets from the least feasible one to FSDP2's peak; two backward passes of one loss.
    Each budget, the plan's peak, and how many activations are computed again."""
    case = CASES[name]

    def compiled(budget: int) -> tuple[nn.Module, Any]:
        model = of_trace(ctx, case, {"memory_budget": budget})
        return model, backward_twice(model, case, ctx)

    expected = backward_twice(build(case, ctx), case, ctx)
    with pytest.raises(graphshard.InfeasibleBudget) as error:
        compiled(LEAST_PLAUSIBLE_BYTES)
    least_bytes, most_bytes = error.value.shortage.least_bytes, error.value.shortage.fsdp2_bytes
    found = []
    for number in range(8):
        budget = least_bytes + (most_bytes - least_bytes) * number // 7
        model, actual = compiled(budget)
        for value, other in zip(expected, actual, strict=True):
            assert difference(value, other) is None, (budget, difference(value, other))
        (plan,) = graphshard.plans(model)
        assert plan.summary().fsdp2.peak_bytes == most_bytes
        again = len(plan.recompute.activations)
        found.append((budget, plan.summary().peak_bytes, again))
    assert plan_of_its_own(ctx, case, most_bytes) == replace(plan, name="")
    return found


def plan_of_its_own(ctx: Ctx, case: Case, budget: int) -> Plan:
    """Of a model whose trace is its own."""
    model = build(case, ctx)
    options = {"fallback": "error", "memory_budget": budget}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    train(model, case, ctx, 1)
    (plan,) = graphshard.plans(model)
    return replace(plan, name="")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_tied", "gpt_tied_ac"])
def test_every_budget_equals_eager_where_a_graph_is_kept(pool: Pool, name: str) -> None:
    """With dropout, with checkpoints of the user's, with retain_graph."""
    first, second = pool.run(2, every_budget, name, timeout_s=280, keeps_compiled=True)
    assert first == second
    assert all(peak_bytes <= budget for budget, peak_bytes, _ in first)
    assert sum(again > 0 for *_, again in first) >= 4


def free_to_keep(ctx: Ctx, reshard: str) -> tuple[list[int], list[int]]:
    """All-gathers planned and really issued where the user set reshard_after_forward=True."""
    case = CASES["llama"]
    expected = train(build(case, ctx, reshard_after_forward=True), case, ctx, 2)
    options = {"memory_budget": "1GiB", "reshard": reshard}
    model = of_trace(ctx, case, options, reshard_after_forward=True)
    assert_equal(expected, train(model, case, ctx, 2))
    (plan,) = graphshard.plans(model)
    (record,) = root_states_under(model)
    issued = [live.counters.all_gathers for live in record.groups]
    return [s.num_all_gathers for s in plan.schedules], issued


def test_reshard_auto_leaves_every_group_to_the_planner(pool: Pool) -> None:
    (bound, issued), _ = pool.run(2, free_to_keep, "fsdp2", keeps_compiled=True)
    assert bound[1] >= 1
    assert sum(issued) == 2 * sum(bound)
    (kept, issued), _ = pool.run(2, free_to_keep, "auto", keeps_compiled=True)
    assert kept[1] < bound[1] or kept[1] == 0
    assert sum(issued) == 2 * sum(kept)


def accumulated(ctx: Ctx, budget: str) -> tuple[list[bool], int, int]:
    """Three micro-steps; which groups stay gathered between them, gathers planned and issued."""
    case, micro = CASES["llama"], 3
    expected = train(build(case, ctx), case, ctx, 2, micro_steps=micro)
    model = of_trace(ctx, case, {"memory_budget": budget, "micro_steps": micro})
    assert_equal(expected, train(model, case, ctx, 2, micro_steps=micro))
    (plan,) = graphshard.plans(model)
    (record,) = root_states_under(model)
    assert all(live.kept is None for live in record.groups)
    issued = sum(live.counters.all_gathers for live in record.groups)
    return (
        [g.between_micro_steps for g in plan.groups],
        sum(s.num_all_gathers for s in plan.schedules),
        issued,
    )


def test_with_room_groups_stay_gathered_between_micro_steps(pool: Pool) -> None:
    (stays, planned_gathers, issued), _ = pool.run(2, accumulated, "1GiB", keeps_compiled=True)
    assert any(stays)
    assert issued < 2 * 3 * planned_gathers


def on_device(ctx: Ctx) -> tuple[int, int]:
    case = CASES["llama"]
    expected = train(build(case, ctx), case, ctx, 2)
    model = of_trace(ctx, case, {"memory_budget": "device"})
    assert_equal(expected, train(model, case, ctx, 2))
    (plan,) = graphshard.plans(model)
    return plan.estimate.budget_bytes, plan.estimate.peak_bytes


def test_the_devices_memory_is_a_budget(pool: Pool) -> None:
    first, second = pool.run(2, on_device, keeps_compiled=True)
    assert first == second
    budget_bytes, peak_bytes = first
    assert peak_bytes < budget_bytes < 2**50


def infeasible(ctx: Ctx, budget: object, shares_trace: bool) -> str:
    case = CASES["llama"]
    if shares_trace:
        model = of_trace(ctx, case, {"memory_budget": budget})
    else:
        model = build(case, ctx)
        model.compile(backend="graphshard", options={"memory_budget": budget})
    for _ in range(2):
        with pytest.raises(graphshard.InfeasibleBudget) as error:
            case.loss(model, case.batch(0, ctx.rank, ctx.device))
    return str(error.value)


def test_a_budget_without_a_unit_is_bytes_and_the_error_says_so(pool: Pool) -> None:
    first, second = pool.run(2, infeasible, 70, True, keeps_compiled=True)
    assert first == second
    assert "a memory budget of 70 B; " in first
    hint = "memory_budget='70GiB', since a number without a unit means bytes; a budget of "
    assert f"What would help: {hint}" in first


def slow_network(ctx: Ctx, name: str) -> tuple[tuple[str, ...], int, int, int]:
    """Without any budget, where gathers take a thousand times what compute does."""

    def said(original: Any) -> Any:
        return lambda *args: replace(original(*args), intra_bytes_per_us=1.0)

    case = ALL[name]  # of three blocks nothing is worth computing again
    expected = train(build(case, ctx), case, ctx, 2)
    with patched(presets, "_network", said):
        model = build(case, ctx)
        model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
        assert_equal(expected, train(model, case, ctx, 2))
    (plan,) = graphshard.plans(model)
    budget_bytes, theirs = plan.estimate.budget_bytes, plan.estimate.fsdp2
    return plan.recompute.activations, budget_bytes, plan.estimate.peak_bytes, theirs.peak_bytes


@pytest.mark.parametrize("name", ["llama", "convnet"])
def test_what_is_computed_again_makes_room_within_fsdp2s_own_peak(pool: Pool, name: str) -> None:
    """Of the graph that saves everything: the other one needs less, and could keep nothing. What
    reads a norm's running statistics is not computed again: forward has changed them."""
    first, second = pool.run(2, slow_network, name)
    assert first == second
    recompute, budget_bytes, peak_bytes, theirs_bytes = first
    assert recompute or name == "convnet"
    assert peak_bytes <= budget_bytes == theirs_bytes


def test_a_budget_that_nothing_fits_is_an_error(pool: Pool) -> None:
    """Raised as it is, on every rank, in units that people read."""
    first, second = pool.run(2, infeasible, "1KiB", False)
    assert first == second
    assert first.startswith("GS601: no schedule fits a memory budget of 1.0 KiB; ")
    assert "GiB', since" not in first


class InTwo(nn.Module):
    """A graph break divides it, or not."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            if self.breaks and place == 2:
                torch._dynamo.graph_break()
            x = block(x).relu()
        return x


def in_two(ctx: Ctx, breaks: bool) -> set[Reshard]:
    """Who says what stays gathered, in all plans of the model."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return shard_blocks(("blocks",), InTwo(breaks), ctx.mesh)

    def trained(model: nn.Module) -> list[Tensor]:
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 16)).sum()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            losses.append(loss.detach())
        return losses

    oracle, model = made(), made()
    model.compile(backend="graphshard")
    assert all(map(torch.equal, trained(oracle), trained(model)))
    plans = graphshard.plans(model)
    assert len(plans) == 1 + breaks
    return {group.resharded_by for plan in plans for group in plan.groups}


@pytest.mark.parametrize(("breaks", "who"), [(False, Reshard.OPEN), (True, Reshard.FSDP2)])
def test_parts_of_a_model_keep_no_more_than_fsdp2(pool: Pool, breaks: bool, who: Reshard) -> None:
    """What one part held would come on top of what the others hold."""
    assert pool.run(2, in_two, breaks) == [{who}] * 2
