"""All-gathers of several groups and of parts of groups: same bits, memory as planned.

Cases that only change the plan keep what the first of them compiled (`pool.run(...,
keeps_compiled=True)`): each has its own model and says which plan that runs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import contract_setups as do
import pytest
import torch
from contract_models import mesh_of, plain
from gathered import watch_gathered
from models import CASES as ALL
from models import Case, of_depth
from parity import FSDP2_ORDER, HALF, assert_equal, build, count_collectives, train, twin
from patching import patched, without_clones
from poison import poisoned
from pool import Ctx, Pool
from regrouping import merged, split, split_reductions
from replanning import Programs, kept_programs, run_as
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from traced_once import TracedOnce

import graphshard
from graphshard.capture.root_state import handle_of
from graphshard.pricing import op_costs, problem
from graphshard.runtime import buckets
from graphshard.schedule.plan import Plan, StepKind

pytestmark = pytest.mark.dist

CASES = {**ALL, "short": of_depth("llama", 3)}
PLANS: dict[str, Callable[[Plan], Plan]] = {
    "merge 2": partial(merged, count=2),
    "merge 3": partial(merged, count=3),
    "merge all": partial(merged, count=1000),
    "split 1": partial(split, count=1),
    "split 3": partial(split, count=3),
    "split reductions": partial(split_reductions, count=3),
}
PROGRAMS: Programs = {}  # of this rank: what was compiled, for `run_as`


def on_mesh(ctx: Ctx, shape: tuple[int, int] | None) -> Ctx:
    """The same rank, on a mesh of replicas and shards."""
    if shape is None:
        return ctx
    return replace(ctx, mesh=mesh_of(ctx, shape, "replicas", "shards"))


def regrouped(
    ctx: Ctx, case_name: str, names: Sequence[str], shape: Any, kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """Two steps with each plan against FSDP2, and what one more backward really issues."""
    ctx, case = on_mesh(ctx, shape), CASES[case_name]
    oracle, model, programs = compiled_twin(case, ctx, **kwargs)
    found = []
    for number, name in enumerate(names):
        plan = run_as(model, programs, PLANS[name])
        steps = {"steps": 2, "first_step": 1 + 2 * number}
        assert_equal(train(oracle, case, ctx, **steps), train(model, case, ctx, **steps))
        before = issued(model)
        with watch_gathered() as seen, count_collectives() as counts:
            case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
        model.zero_grad()
        found.append(
            {
                "name": name,
                "peak": seen.peak_bytes,
                "planned_peak": plan.gathered_peak_bytes(),
                "left": seen.alive_bytes(),
                "gathers": counts.all_gather,
                "planned": sum(s.num_all_gathers for s in plan.schedules),
                "counted": issued(model) - before,
                "groups": len(plan.groups),
                "json": plan.to_json(),
            }
        )
    return found


def compiled_twin(case: Case, ctx: Ctx, **kwargs: Any) -> tuple[nn.Module, nn.Module, Programs]:
    """Eager and compiled, after one equal step; what an earlier case kept is not compiled again."""
    oracle, model = twin(case, ctx, **kwargs)
    model.compile(backend="graphshard", **FSDP2_ORDER)
    with kept_programs() as programs:
        assert_equal(train(oracle, case, ctx, 1), train(model, case, ctx, 1))
    PROGRAMS.update(programs)
    return oracle, model, PROGRAMS


def issued(model: nn.Module) -> int:
    """All-gathers so far; there is no handle before the first call."""
    handles = {handle_of(module) for module in model.modules()} - {None}
    return sum(live.counters.all_gathers for handle in handles for live in handle.lives)


def check(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    for own in ranks:
        for seen, first in zip(own, ranks[0], strict=True):
            assert seen["json"] == first["json"]
            assert seen["gathers"] == seen["planned"] == seen["counted"], seen["name"]
            assert seen["peak"] == seen["planned_peak"], seen["name"]
            assert seen["left"] == 0, seen["name"]
    return ranks[0]


@pytest.mark.parametrize("case_name", ["llama", "gpt_tied"])
def test_no_bit_changes(pool: Pool, case_name: str) -> None:
    ranks = pool.run(2, regrouped, case_name, list(PLANS), None, {}, keeps_compiled=True)
    for seen in check(ranks):
        one_each = 2 * seen["groups"] - 1  # the root stays gathered
        assert (seen["gathers"] < one_each) == seen["name"].startswith("merge")
        if seen["name"] == "merge all":
            assert seen["gathers"] == 2


def reduced_in_parts(ctx: Ctx, micro_steps: int) -> tuple[int, int]:
    """Reductions of one step, and groups; bits are those of FSDP2, also after micro-steps."""
    case = CASES["llama"]
    oracle, model, programs = compiled_twin(case, ctx)
    plan = run_as(model, programs, PLANS["split reductions"])
    steps = {"steps": 2, "first_step": 1, "micro_steps": micro_steps}
    assert_equal(train(oracle, case, ctx, **steps), train(model, case, ctx, **steps))
    with count_collectives() as counts:
        case.loss(model, case.batch(3, ctx.rank, ctx.device)).backward()
    assert counts.reduce_scatter == sum(s.num_reduce_scatters for s in plan.schedules)
    return counts.reduce_scatter, len(plan.groups)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_reductions_in_parts(pool: Pool, micro_steps: int) -> None:
    for reductions, groups in pool.run(2, reduced_in_parts, micro_steps, keeps_compiled=True):
        assert reductions > groups


# -- waits, releases, failures -------------------------------------------------------------------


def with_poison(ctx: Ctx) -> None:
    case = CASES["gpt_tied"]
    oracle, model, programs = compiled_twin(case, ctx)
    with poisoned():
        for number, plan_name in enumerate(("merge 3", "split 1")):
            run_as(model, programs, PLANS[plan_name])
            steps = {"steps": 2, "first_step": 1 + 2 * number}
            assert_equal(train(oracle, case, ctx, **steps), train(model, case, ctx, **steps))


def test_missing_wait_or_use_after_release_would_show(pool: Pool) -> None:
    pool.run(2, with_poison, keeps_compiled=True)


class Failing:
    """The n-th call fails."""

    def __init__(self, original: Callable[..., Any], calls: int) -> None:
        self.original, self.calls = original, calls

    def __call__(self, *args: Any) -> Any:
        self.calls -= 1
        if self.calls == 0:
            raise ZeroDivisionError
        return self.original(*args)


def failing(ctx: Ctx, calls: int) -> None:
    """A forward fails in the middle; everything is sharded, and training goes on as in FSDP2."""
    case = CASES["llama"]
    oracle, model, programs = compiled_twin(case, ctx)
    faults = itertools.product(("merge 2", "split 3"), ("all_gather", "_copy_out"))
    for step, (plan_name, function) in enumerate(faults, start=1):
        run_as(model, programs, PLANS[plan_name])
        fault = patched(buckets, function, partial(Failing, calls=calls))
        with watch_gathered() as seen:
            with fault, pytest.raises(ZeroDivisionError):
                case.loss(model, case.batch(0, ctx.rank, ctx.device))
            assert seen.peak_bytes > 0
            assert seen.alive_bytes() == 0
        for module in (model, *model.blocks):
            (live,) = handle_of(module).lives
            assert live.fsdp.is_sharded
            assert live.kept is None
        assert all(isinstance(p, DTensor) for p in model.parameters())
        steps = {"steps": 1, "first_step": step}
        assert_equal(train(oracle, case, ctx, **steps), train(model, case, ctx, **steps))


def test_after_a_failure_everything_is_sharded(pool: Pool) -> None:
    pool.run(2, failing, 2, keeps_compiled=True)


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
    "lists that change": Setting(before=do.toggle_prefetch),
    "dtypes": Setting(every_other_half, gathers=4 * 5),
    "one comm": Setting(comm_of_one_block, gathers=6 * 5),
    "same comm": Setting(do.custom_all_gather, gathers=4 * 5),
    "lists": Setting(do.prefetch_two, gathers=9 * 5),
    "smaller mesh": Setting(smaller_mesh, ranks=4),
}


REGROUPED = ("merge 3", "split 3")


def with_setting(ctx: Ctx, setting_name: str) -> list[int]:
    """Compare 5 steps with FSDP2, with each plan; all-gathers that graphshard issued."""
    setting, case = SETTINGS[setting_name], CASES["llama"]
    oracle, model = (_sharded(setting, case, ctx) for _ in range(2))
    model.compile(backend="graphshard", **FSDP2_ORDER)

    def compare(steps: range) -> int:
        before = issued(model)
        for step in steps:
            traces = []
            for each in (oracle, model):
                setting.before(each, step)
                traces.append(train(each, case, ctx, 1, first_step=step))
            assert_equal(*traces)
        return issued(model) - before

    with kept_programs() as programs:
        compare(range(2))  # what the user does alternates
    counts = []
    for number, plan_name in enumerate(REGROUPED):
        run_as(model, programs, PLANS[plan_name])
        counts.append(compare(range(2 + 5 * number, 7 + 5 * number)))
    return counts


def _sharded(setting: Setting, case: Case, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    return setting.shard(case.build().to(ctx.device), ctx)


@pytest.mark.parametrize("setting_name", SETTINGS)
def test_what_the_user_does_is_binding(pool: Pool, setting_name: str) -> None:
    setting = SETTINGS[setting_name]
    counts = pool.run(setting.ranks, with_setting, setting_name)
    assert counts == counts[:1] * len(counts)
    if setting.gathers is not None:
        assert counts[0][REGROUPED.index("merge 3")] == setting.gathers


# -- settings -------------------------------------------------------------------------------------


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
def test_no_bit_changes_with_settings(pool: Pool, shape: Any, kwargs: dict[str, Any]) -> None:
    # What replicas add up is reduced whole.
    names = ["merge 3", "split 3", *(["split reductions"] if shape is None else [])]
    ranks = pool.run(2, regrouped, "short", names, shape, kwargs)
    if shape == (2, 1):  # one rank has everything: nothing is gathered
        assert all(seen["gathers"] == 0 for own in ranks for seen in own)
    else:
        check(ranks)


# -- what the planner decides --------------------------------------------------------------------


def nothing(_: object) -> Callable[..., tuple[()]]:
    return lambda *_: ()


def budgeted(ctx: Ctx, case_name: str, shares: list[float]) -> list[dict[str, Any]]:
    """Budgets as shares of FSDP2's peak; every group may be split."""
    case, found, own_bytes, once = CASES[case_name], [], 2**40, TracedOnce()
    expected = train(build(case, ctx), case, ctx, 2)
    for share in (1.0, *shares):
        model = once.compiled(partial(build, case, ctx), memory_budget=int(own_bytes * share))
        # Small groups are split too, and nothing is computed again instead.
        huge = patched(problem, "HUGE", lambda _: 0)
        with patched(op_costs, "units", nothing), huge, without_clones():
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
