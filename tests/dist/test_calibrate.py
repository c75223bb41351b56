"""Calibration on real process groups, and bytes by category of real FSDP2 groups."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from parity import build
from pool import Ctx, Pool
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.calibrate.calibrate import believed, calibrate, groups_of
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import collective_us
from graphshard.cost.memory import OPTIMIZERS, ParamFacts, group_bytes, total_bytes
from graphshard.cost.presets import preset_for
from graphshard.cost.profile import CostProfile, calibrated
from graphshard.errors import CostError
from graphshard.fsdp2 import FsdpGroup, fsdp_groups

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SIZES = (4096, 65536, 2**23)  # the last takes longer, however busy the machine is


def sweep(ctx: Ctx) -> tuple[str, list[str]]:
    said: list[str] = []
    profile = calibrate(
        groups_of(ctx.mesh), ctx.device, sizes_bytes=SIZES, repetitions=3, say=said.append
    )
    return profile.to_json(), said


@pytest.mark.alone  # larger collectives take longer
def test_every_rank_gets_the_same_profile(pool: Pool) -> None:
    (text, said), *others = pool.run(2, sweep)
    assert [other for other, _ in others] == [text] * len(others)
    assert said[-1] == "pointwise ops"
    assert all(silent == [] for _, silent in others)
    profile = CostProfile.from_json(text)
    if profile.origin.world_size == 1:
        return
    assert [c.kind for c in profile.comm] == list(CollectiveKind)
    assert {c.group for c in profile.comm} == {RankGroup(2, 2, "dim0")}
    assert [s.amount for s in profile.comm[0].fit.samples] == [n / 2 for n in SIZES]
    machine = calibrated(preset_for(profile.origin.device), profile)
    for kind in CollectiveKind:
        times = [collective_us(machine, kind, RankGroup(2, 2, "dim0"), n) for n in SIZES]
        assert 0 < times[0] <= times[-1] < 1e6


def refused(ctx: Ctx, sizes: tuple[int, ...]) -> str:
    with pytest.raises(CostError) as caught:
        calibrate(groups_of(ctx.mesh), ctx.device, sizes_bytes=sizes)
    return str(caught.value)


@pytest.mark.parametrize("sizes", [(4096,), (4096, 4096), (0, 4096)])
def test_sizes_that_cannot_be_fitted(pool: Pool, sizes: tuple[int, ...]) -> None:
    assert all(text.startswith("GS504") for text in pool.run(2, refused, sizes))


def believed_of(ctx: Ctx, rounds: list[list[float]]) -> tuple[list[float] | None, int, list[str]]:
    """rounds: times of sizes 1, 2, 3 (in millions) and on in each round, slower on higher ranks."""
    left = iter(rounds)

    def measure() -> dict[float, float]:
        return {1e6 * n: us + ctx.rank for n, us in enumerate(next(left), start=1)}

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit = believed("a collective", measure)
    found = None if fit is None else [sample.us for sample in fit.samples]
    return found, len(rounds) - len(list(left)), [str(w.message) for w in said]


@pytest.mark.parametrize(
    ("rounds", "found", "count"),
    [
        ([[10.0, 20.0, 30.0]], [10.5, 20.5, 30.5], 1),
        ([[90.0, 80.0, 30.0], [10.0, 20.0, 90.0]], [10.5, 20.5, 30.5], 2),
        ([[30.0, 20.0, 10.0]] * 3, None, 3),
        ([[1.0, 900.0, 2.0, 700.0, 1.0, 990.0]] * 3, None, 3),
    ],
)
def test_times_that_make_no_sense_are_measured_again(
    pool: Pool, rounds: list[list[float]], found: list[float] | None, count: int
) -> None:
    first, second = pool.run(2, believed_of, rounds)
    assert first[:2] == second[:2] == (found, count)
    assert second[2] == []
    assert [text.startswith("GS505: a collective left out") for text in first[2]] == (
        [] if found else [True]
    )


def held_bytes(ctx: Ctx, name: str, mixed: bool) -> dict[str, tuple[Any, Any]]:
    """(measured, predicted) bytes after a step of AdamW, storages counted once."""
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    case = CASES[name]
    model = build(case, ctx, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
    optimizer.step()
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    groups = [group for state in dict.fromkeys(states) for group in fsdp_groups(state)]
    params = [p.sharded for group in groups for p in group.params]
    total = total_bytes(
        group_bytes(facts(group, mixed), ctx.world_size, OPTIMIZERS["adamw"]) for group in groups
    )
    state = [t for p in params for t in optimizer.state[p].values()]
    grads = [p.grad for p in params if p.grad is not None]
    return {
        "sharded params": (stored(params), total.sharded_param),
        "sharded gradients": (stored(grads), total.sharded_grad),
        "optimizer state": (stored(state), total.opt_state),
    }


def facts(group: FsdpGroup, mixed: bool) -> list[ParamFacts]:
    gathered = 2 if mixed else 4
    return [
        ParamFacts(p.size, 4, gathered, 4, p.shard_dim, p.sharded.requires_grad)
        for p in group.params
    ]


def stored(tensors: list[Any]) -> int:
    storages = {
        local.untyped_storage()._cdata: local.untyped_storage().nbytes()
        for local in (getattr(t, "_local_tensor", t) for t in tensors)
    }
    return sum(storages.values())


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_bytes_of_a_real_model(pool: Pool, name: str, mixed: bool) -> None:
    seen = pool.run(2, held_bytes, name, mixed)
    for category in seen[0]:
        # The rank that holds most: the others may have a row less where shards are uneven.
        measured = max(rank[category][0] for rank in seen)
        assert measured == seen[0][category][1], category


@pytest.mark.alone
def test_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "graphshard.cli", "calibrate", "-o", str(out), "--sizes", "4KiB,4MiB"),
        *("--repetitions", "3"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    profile = CostProfile.from_json(out.read_text())
    assert done.stdout.count("all_gather world, 2 ranks") == 1
    assert done.stderr.count("graphshard calibrate: pointwise ops") == 1
    assert "graphshard calibrate -o" in profile.origin.command
    assert math.isfinite(json.loads(out.read_text())["memory"]["base_us"])
