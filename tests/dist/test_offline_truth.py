"""What is planned offline is what runs: the same schedules, and the bytes that are really gathered.

Two ranks calibrate themselves and train; another process, which never saw them, plans for two ranks
with their profile.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_models import mesh_of
from gathered import planned, recording, sampled_on
from patching import patched
from pool import Ctx, Pool, capped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from bench.models import Config, Llama, WithLoss, make_batch
from graphshard.calibrate.calibrate import calibrate, groups_of
from graphshard.compiler import instrument
from graphshard.schedule.plan import Plan

pytestmark = pytest.mark.dist

# More blocks than are captured offline.
CONFIG = Config(64, 7, 2, 192, 256, 64)
SIZES = (4096, 65536, 2**20)
ASKED: tuple[dict[str, Any], ...] = ({}, {"reshard": "auto"}, {"memory_budget": 0.9})


def sharded(mesh: Any = None) -> Any:
    model = WithLoss(Llama(CONFIG))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(number: int) -> tuple[torch.Tensor, ...]:
    """Tensors of their own, as offline; `make_batch` gives views of one."""
    return tuple(part.clone() for part in make_batch(CONFIG, number))


def calibrated(ctx: Ctx, path: str) -> int:
    profile = calibrate(groups_of(ctx.mesh), ctx.device, sizes_bytes=SIZES, repetitions=3)
    if ctx.rank == 0:
        Path(path).write_text(profile.to_json())
    return ctx.mesh.size()


def trained(ctx: Ctx, path: str, asked: dict[str, Any]) -> tuple[str, list[int]]:
    """The plan, and what is gathered after each of its communication steps."""
    torch.manual_seed(0)
    model, ranges = sharded(ctx.mesh), []
    options = {"fallback": "error", "machine": path, "replan_after": 1000, **asked}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    with patched(instrument, "with_marks", recording(ranges)):
        for step in range(3):
            model(*batch(2 * step + ctx.rank)).backward()
    model.zero_grad()
    (plan,) = graphshard.plans(model)
    seen = sampled_on(model, batch(ctx.rank), ranges)
    assert [step for step, _ in seen] == [step for step, _ in planned(plan)]
    return plan.to_json(), [size for _, size in seen]


def offline(
    path: str, world_size: int, asked: dict[str, Any], build: Callable[[], Any] = sharded
) -> Plan:
    inputs = torch.zeros((2, CONFIG.batch, CONFIG.seq_len), dtype=torch.int64, device="meta")
    return graphshard.plan(
        build,
        tuple(inputs),
        world_size=world_size,
        hardware=path,
        name="offline",
        compute="aten",
        **asked,
    )


@cache
def planned_ahead(path: str, world_size: int) -> Plan:
    """Nothing is asked for."""
    return offline(path, world_size, {})


@pytest.fixture(scope="module")
def machine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """The profile, and of how many ranks."""
    path = str(tmp_path_factory.mktemp("calibrated") / "machine.json")
    return path, pool.run(2, calibrated, path)[0]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: next(iter(asked), "default"))
def test_an_offline_plan_is_the_plan_that_runs(
    pool: Pool, machine: tuple[str, int], asked: dict[str, Any]
) -> None:
    path, world_size = machine
    if "memory_budget" in asked:
        free = planned_ahead(path, world_size).estimate
        assert free is not None
        asked = {"memory_budget": int(asked["memory_budget"] * free.fsdp2.peak_bytes)}
    ahead = offline(path, world_size, asked) if asked else planned_ahead(path, world_size)
    for text, gathered in pool.run(2, trained, path, asked):
        assert_same(Plan.from_json(text), ahead)
        assert gathered == [size for _, size in planned(ahead)]


def prices(plan: Plan) -> list[tuple[list[float], list[float]]]:
    """Of FSDP2's own order, each way: what steps compute, and how long collectives take."""
    assert plan.fsdp2 is not None
    return [
        ([step.work_us for step in one.steps], [taken.us for taken in one.collectives])
        for one in plan.fsdp2.forecasts
    ]


def assert_same(ran: Plan, ahead: Plan) -> None:
    assert prices(ran) == prices(ahead)  # first: plans differ where prices do
    assert ran.collective_signature == ahead.collective_signature
    assert ran.groups == ahead.groups
    assert ran.schedules == ahead.schedules
    assert (ran.fsdp2, ran.forecasts) == (ahead.fsdp2, ahead.forecasts)
    assert ran.estimate == ahead.estimate


def replicated() -> Any:
    """Two replicas of two ranks."""
    return sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def trained_replicas(ctx: Ctx, path: str) -> str:
    mesh = mesh_of(ctx, (2, 2), "replicate", "shard")
    text, _ = trained(replace(ctx, mesh=mesh), path, {})
    return text


@pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks")
def test_replicas_are_planned_offline_too(pool: Pool, machine: tuple[str, int]) -> None:
    path, _ = machine
    ahead = offline(path, 4, {}, replicated)
    assert ahead.summary().all_reduces == len(ahead.groups)
    for text in pool.run(4, trained_replicas, path):
        assert_same(Plan.from_json(text), ahead)
