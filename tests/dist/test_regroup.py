"""All-gathers of several groups and of parts of groups: no bit changes, and memory is as planned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES
from parity import assert_equal, build, count_collectives, local, train
from pool import Ctx, Pool
from regrouping import merged, split
from test_memory import STRICT, patched, poison, poison_released, watch_gathered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard import pipeline
from graphshard.capture.ports import port_of
from graphshard.plan import Plan
from graphshard.runtime import gather, reduce

pytestmark = pytest.mark.dist

PLANS: dict[str, Callable[[Plan], Plan]] = {
    "merge 2": partial(merged, count=2),
    "merge 3": partial(merged, count=3),
    "merge all": partial(merged, count=1000),
    "split 1": partial(split, count=1),
    "split 3": partial(split, count=3),
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def planned_as(name: str) -> Iterator[None]:
    """Every plan made inside has the collectives that PLANS[name] gives it."""

    def changed(original: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
        return lambda program: PLANS[name](original(program))

    with patched(pipeline, "_plan", changed):
        yield


def on_mesh(ctx: Ctx, shape: tuple[int, int] | None) -> Ctx:
    """The same rank, on a mesh of replicas and shards."""
    if shape is None:
        return ctx
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicas", "shards"))
    return replace(ctx, mesh=mesh)


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
    lives = {port_of(m).live for m in model.modules() if port_of(m) is not None}
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


@pytest.mark.parametrize("plan_name", ["merge 3", "split 3"])
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
