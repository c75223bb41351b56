"""All-gathers of several groups and of parts of groups: same bits, memory as planned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import contract_setups as do
import pytest
import torch
from contract_models import mesh_of, plain
from models import CASES
from parity import assert_equal, build, count_collectives, train
from pool import Ctx, Pool
from regrouping import merged, split, split_reductions
from test_memory import STRICT, patched, poison, poison_released, watch_gathered
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.capture.root_state import handle_of
from graphshard.compiler import planning
from graphshard.pricing import op_costs, problem
from graphshard.runtime import buckets, gather_buffers, reduce
from graphshard.schedule.plan import Plan, StepKind

pytestmark = pytest.mark.dist

PLANS: dict[str, Callable[[Plan], Plan]] = {
    "merge 2": partial(merged, count=2),
    "merge 3": partial(merged, count=3),
    "merge all": partial(merged, count=1000),
    "split 1": partial(split, count=1),
    "split 3": partial(split, count=3),
    "split reductions": partial(split_reductions, count=3),
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def planned_as(name: str) -> Iterator[None]:
    """Every plan made inside has the collectives that PLANS[name] gives it."""

    def changed(original: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
        return lambda *args: PLANS[name](original(*args))

    with patched(planning, "plan_with_costs", changed):
        yield


def on_mesh(ctx: Ctx, shape: tuple[int, int] | None) -> Ctx:
    """The same rank, on a mesh of replicas and shards."""
    if shape is None:
        return ctx
    return replace(ctx, mesh=mesh_of(ctx, shape, "replicas", "shards"))


def regrouped(
    ctx: Ctx, case_name: str, plan_name: str, shape: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Compare 3 steps with FSDP2, and count what one more step really does."""
    ctx, case = on_mesh(ctx, shape), CASES[case_name]
    expected = train(build(case, ctx, **kwargs), case, ctx, 3)
    model = build(case, ctx, **kwargs)
    model.compile(backend="graphshard", **STRICT)
    with planned_as(plan_name):
        assert_equal(expected, train(model, case, ctx, 3))
    (plan,) = graphshard.plans(model)
    before = issued(model)
    with watch_gathered() as seen, count_collectives() as counts:
        case.loss(model, case.batch(3, ctx.rank, ctx.device)).backward()
    return {
        "peak": seen.peak_bytes,
        "planned_peak": plan.gathered_peak_bytes(),
        "left": seen.alive_bytes(),
        "gathers": counts.all_gather,
        "planned": sum(s.num_all_gathers for s in plan.schedules),
        "counted": issued(model) - before,
        "groups": len(plan.groups),
        "json": plan.to_json(),
    }


def issued(model: nn.Module) -> int:
    lives = {handle_of(m).live for m in model.modules() if handle_of(m) is not None}
    return sum(live.counters.all_gathers for live in lives)


def check(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    first = ranks[0]
    for seen in ranks:
        assert seen["json"] == first["json"]
        assert seen["gathers"] == seen["planned"] == seen["counted"]
        assert seen["peak"] == seen["planned_peak"]
        assert seen["left"] == 0
    return first


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("case_name", ["llama", "gpt_tied"])
def test_no_bit_changes(pool: Pool, case_name: str, plan_name: str) -> None:
    seen = check(pool.run(2, regrouped, case_name, plan_name, None, {}))
    one_each = 2 * seen["groups"] - 1  # the root stays gathered
    assert (seen["gathers"] < one_each) == plan_name.startswith("merge")
    if plan_name == "merge all":
        assert seen["gathers"] == 2


def reduced_in_parts(ctx: Ctx, micro_steps: int) -> tuple[int, int]:
    """Reductions of one step, and groups; bits are those of FSDP2, also after micro-steps."""
    case = CASES["llama"]
    oracle, model = build(case, ctx), build(case, ctx)
    model.compile(backend="graphshard", **STRICT)
    expected = train(oracle, case, ctx, 3, micro_steps=micro_steps)
    with planned_as("split reductions"):
        assert_equal(expected, train(model, case, ctx, 3, micro_steps=micro_steps))
    (plan,) = graphshard.plans(model)
    with count_collectives() as counts:
        case.loss(model, case.batch(3, ctx.rank, ctx.device)).backward()
    assert counts.reduce_scatter == sum(s.num_reduce_scatters for s in plan.schedules)
    return counts.reduce_scatter, len(plan.groups)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_reductions_in_parts(pool: Pool, micro_steps: int) -> None:
    for reductions, groups in pool.run(2, reduced_in_parts, micro_steps):
        assert reductions > groups


@pytest.mark.parametrize("plan_name", ["merge 3", "split 3", "split reductions"])
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        (None, {"mp_policy": HALF}),
        (None, {"reshard_after_forward": True}),
        (None, {"reshard_after_forward": False}),
        ((1, 2), {}),
        ((2, 1), {}),
    ],
    ids=["bf16", "reshard", "keep", "hsdp-1x2", "hsdp-2x1"],
)
def test_no_bit_changes_with_settings(
    pool: Pool, plan_name: str, shape: Any, kwargs: dict[str, Any]
) -> None:
    ranks = pool.run(2, regrouped, "llama", plan_name, shape, kwargs)
    if shape == (2, 1):  # one rank has everything: nothing is gathered
        assert all(seen["gathers"] == 0 for seen in ranks)
    else:
        check(ranks)


# -- who travels alone ---------------------------------------------------------------------------


def every_other_half(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Neighbours of different dtypes, so that a merged gather carries bytes."""
    for index, block in enumerate(model.blocks):
        policy = {"mp_policy": HALF} if index % 2 else {}
        fully_shard(block, mesh=ctx.mesh, **policy)
    return fully_shard(model, mesh=ctx.mesh)


def comm_of_one_block(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Block 1 has a collective of the user's own."""
    plain(model, ctx)
    model.log = do.LoggedAllGather()
    model.blocks[1].set_custom_all_gather(model.log)
    return model


def smaller_mesh(model: nn.Module, ctx: Ctx) -> nn.Module:
    return plain(model, ctx, reshard_after_forward=2)


@dataclass(frozen=True)
class Setting:
    """How the model is sharded, what the user does before each step, and gathers of 5 steps."""

    shard: Callable[[nn.Module, Ctx], nn.Module] = plain
    before: Callable[[nn.Module, int], None] = do.nothing
    gathers: int | None = None
    ranks: int = 2


# 5 groups, "merge 3": 2 gathers in forward, and in backward 2 (4 groups, the root is kept).
SETTINGS = {
    "unshard": Setting(before=do.unshard_first),
    "dtypes": Setting(every_other_half, gathers=4 * 5),
    "one comm": Setting(comm_of_one_block, gathers=6 * 5),
    "same comm": Setting(do.custom_all_gather, gathers=4 * 5),
    "lists": Setting(do.prefetch_two, gathers=9 * 5),
    "lists that change": Setting(before=do.toggle_prefetch),
    "smaller mesh": Setting(smaller_mesh, ranks=4),
}


def with_setting(ctx: Ctx, setting_name: str, plan_name: str) -> int:
    """Compare 5 steps with FSDP2; all-gathers that graphshard issued."""
    setting, case = SETTINGS[setting_name], CASES["llama"]
    compiled: nn.Module | None = None
    traces = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = setting.shard(case.build().to(ctx.device), ctx)
        if is_compiled:
            model.compile(backend="graphshard", **STRICT)
            compiled = model
        with planned_as(plan_name):
            for step in range(5):
                setting.before(model, step)
                traces.append(train(model, case, ctx, 1, first_step=step))
    for expected, actual in zip(traces[:5], traces[5:], strict=True):
        assert_equal(expected, actual)
    return issued(compiled)


@pytest.mark.parametrize("plan_name", ["merge 3", "split 3"])
@pytest.mark.parametrize("setting_name", SETTINGS)
def test_what_the_user_does_is_binding(pool: Pool, setting_name: str, plan_name: str) -> None:
    setting = SETTINGS[setting_name]
    counts = pool.run(setting.ranks, with_setting, setting_name, plan_name)
    assert counts == counts[:1] * len(counts)
    wanted = setting.gathers
    if plan_name == "merge 3" and wanted is not None:
        assert counts[0] == wanted


# -- waits, releases, failures -------------------------------------------------------------------


def poisoned(ctx: Ctx, plan_name: str) -> None:
    """What is read before its wait or after its release is NaN."""
    case = CASES["gpt_tied"]
    expected = train(build(case, ctx), case, ctx, 3)
    model = build(case, ctx)
    model.compile(backend="graphshard", **STRICT)
    with (
        planned_as(plan_name),
        patched(buckets, "all_gather", poison(0)),
        patched(reduce, "reduce_scatter", poison(0)),
        patched(gather_buffers, "free", poison_released),
    ):
        assert_equal(expected, train(model, case, ctx, 3))


@pytest.mark.parametrize("plan_name", ["merge 3", "split 1"])
def test_missing_wait_or_use_after_release_would_show(pool: Pool, plan_name: str) -> None:
    pool.run(2, poisoned, plan_name)


class Failing:
    """The n-th call fails."""

    def __init__(self, original: Callable[..., Any], calls: int) -> None:
        self.original, self.calls = original, calls

    def __call__(self, *args: Any) -> Any:
        self.calls -= 1
        if self.calls == 0:
            raise ZeroDivisionError
        return self.original(*args)


def failing(ctx: Ctx, plan_name: str, function: str, calls: int) -> None:
    """A forward fails in the middle; everything is sharded, and training goes on as in FSDP2."""
    case = CASES["llama"]
    expected = train(build(case, ctx), case, ctx, 2)
    model = build(case, ctx)
    model.compile(backend="graphshard", **STRICT)
    with planned_as(plan_name):
        case.loss(model, case.batch(0, ctx.rank, ctx.device))
    model.reshard()
    with watch_gathered() as seen:
        with patched(buckets, function, partial(Failing, calls=calls)):
            try:
                case.loss(model, case.batch(0, ctx.rank, ctx.device))
                raise AssertionError("it did not fail")
            except ZeroDivisionError:
                pass
        assert seen.peak_bytes > 0
        assert seen.alive_bytes() == 0
    for module in (model, *model.blocks):
        live = handle_of(module).live
        assert live.fsdp.is_sharded
        assert live.kept is None
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_equal(expected, train(model, case, ctx, 2))


@pytest.mark.parametrize(("function", "calls"), [("all_gather", 2), ("_copy_out", 2)])
@pytest.mark.parametrize("plan_name", ["merge 2", "split 3"])
def test_after_a_failure_everything_is_sharded(
    pool: Pool, plan_name: str, function: str, calls: int
) -> None:
    pool.run(2, failing, plan_name, function, calls)


# -- what the planner decides --------------------------------------------------------------------


def nothing(_: object) -> Callable[..., tuple[()]]:
    return lambda *_: ()


def budgeted(ctx: Ctx, case_name: str, shares: list[float]) -> list[dict[str, Any]]:
    """Budgets as shares of FSDP2's peak; every group may be split."""
    case, found, own_bytes = CASES[case_name], [], 2**40
    expected = train(build(case, ctx), case, ctx, 2)
    for share in (1.0, *shares):
        model = build(case, ctx)
        options = {"fallback": "error", "memory_budget": int(own_bytes * share)}
        model.compile(backend="graphshard", fullgraph=True, options=options)
        # Small groups are split too, and nothing is computed again instead.
        with patched(op_costs, "units", nothing), patched(problem, "HUGE", lambda _: 0):
            assert_equal(expected, train(model, case, ctx, 2))
        with watch_gathered() as seen, count_collectives() as counts:
            case.loss(model, case.batch(2, ctx.rank, ctx.device)).backward()
        (plan,) = graphshard.plans(model)
        assert seen.peak_bytes == plan.gathered_peak_bytes()
        assert counts.all_gather == sum(s.num_all_gathers for s in plan.schedules)
        assert plan.estimate.peak_bytes <= plan.estimate.budget_bytes
        own_bytes = plan.estimate.fsdp2.peak_bytes
        issues = [s for d in plan.schedules for s in d.of_kind(StepKind.GATHER_ISSUE)]
        found.append(
            {
                "json": plan.to_json(),
                "merged": any(step.with_groups for step in issues),
                "split": any(step.params for step in issues),
            }
        )
    return found


def test_the_planners_own_merges_and_splits(pool: Pool) -> None:
    ranks = pool.run(2, budgeted, "llama", [1.0, 0.93], timeout_s=300)
    assert ranks[0] == ranks[1]
    assert any(seen["merged"] for seen in ranks[0])
    assert any(seen["split"] for seen in ranks[0])
