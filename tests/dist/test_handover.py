"""What eager FSDP2 would not survive is never handed over to it: ranks whose groups or options
differ get one error, all of them and in time, before anything is traced.

Every case has a process group of its own. What the error replaces (a hang, an abort, wrong numbers)
cannot be run beside it.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from between_steps import assert_clean
from divergence import Blocks, blocks, caught, losses, own_mesh
from pool import Ctx, Pool, capped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.fsdp2.signature import mesh_rows, signature_of
from graphshard.schedule.shortage import Shortage
from graphshard.schedule.steps import Direction, Step, StepKind
from graphshard.view.shortage import shortage_text

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(capped(3) < 3, reason="ranks that differ"),
]

LIMIT_S = 30.0
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def sharded(mesh: DeviceMesh, model: nn.Module, first: int = 0, **kwargs: Any) -> Any:
    for block in [*model.blocks][first:]:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def odd_model(what: str, mesh: DeviceMesh, odd: bool) -> Any:
    """A model that is `odd` in one thing on one rank."""
    torch.manual_seed(0)
    model = Blocks()
    if what == "a parameter less" and odd:
        model.blocks[1] = nn.Linear(16, 16, bias=False)
    if what == "another size" and odd:
        model.blocks[1], model.blocks[2] = nn.Linear(16, 32), nn.Linear(32, 16)
    kwargs: dict[str, Any] = {}
    if what == "float16 and bfloat16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float16) if odd else BF16
    elif what == "a policy" and odd:
        kwargs["mp_policy"] = BF16
    elif what == "what is reduced" and odd:
        kwargs["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    elif what == "resharding" and odd:
        kwargs["reshard_after_forward"] = False
    sharded(mesh, model, first=1 if what == "a group less" and odd else 0, **kwargs)
    if odd:
        change(what, model)
    return model


def change(what: str, model: Any) -> None:
    if what == "a frozen layer":
        model.blocks[2].requires_grad_(False)
    elif what == "the divide factor":
        model.blocks[1].set_gradient_divide_factor(3.0)
    elif what == "sums only":
        model.blocks[0].set_force_sum_reduction_for_comms(True)
    elif what == "synchronisation":
        model.set_requires_gradient_sync(False)
    elif what == "resharding after backward":
        model.set_reshard_after_backward(False)
    elif what == "prefetching":
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    elif what == "gathering in backward":
        model.blocks[3].set_unshard_in_backward(False)


# What differs on the last rank, and what the error says of it.
DIFFERENCES = {
    "float16 and bfloat16": "group blocks.0: parameter blocks.0.weight: the dtype of the "
    "all-gather is bfloat16 on ranks 0, 1; float16 on rank 2",
    "a policy": "the dtype of the all-gather is float32 on ranks 0, 1; bfloat16 on rank 2",
    "what is reduced": "the dtype of the reduce-scatter is none on ranks 0, 1; bfloat16 on rank 2",
    "a parameter less": "group blocks.1: the parameters are blocks.1.bias on ranks 0, 1; no others",
    "another size": "parameter blocks.1.weight: the size is (16, 16) on ranks 0, 1; (32, 16) on",
    "a group less": "the groups are blocks.0 on ranks 0, 1; (root) on rank 2",
    "a frozen layer": "group blocks.2: parameter blocks.2.weight: requires_grad is True on ranks",
    "the divide factor": "blocks.1: the gradient divide factor is None on ranks 0, 1; 3.0 on",
    "sums only": "set_force_sum_reduction_for_comms is False on ranks 0, 1; True on rank 2",
    "resharding": "group blocks.0: reshard_after_forward is True on ranks 0, 1; False on rank 2",
    "synchronisation": "set_requires_gradient_sync is True on ranks 0, 1; False on rank 2",
    "resharding after backward": "reshard_after_backward is True on ranks 0, 1; False on rank 2",
    "prefetching": "the groups to prefetch in forward is none on ranks 0, 1; blocks.1, blocks.2 on",
    "gathering in backward": "set_unshard_in_backward is True on ranks 0, 1; False on rank 2",
}


def differing(ctx: Ctx) -> dict[str, tuple[str, float]]:
    found = {}
    for what in DIFFERENCES:
        model = odd_model(what, own_mesh(ctx), odd=ctx.rank == ctx.world_size - 1)
        model.compile(backend="graphshard", options={"fallback": "warn"})
        try:
            found[what] = caught(lambda model=model: losses(model, ctx, range(1)))
        except BaseException as error:
            raise AssertionError(what) from error
        assert_clean(model)
        assert graphshard.plans(model) == []
    return found


def test_groups_that_differ_on_one_rank_are_an_error_on_all(pool: Pool) -> None:
    ranks = pool.run(3, differing, timeout_s=250)
    for what, text in DIFFERENCES.items():
        assert len({rank[what][0] for rank in ranks}) == 1, [rank[what] for rank in ranks]
        assert ranks[0][what][0].startswith("GS702: FSDP2 itself would send different things")
        assert text in ranks[0][what][0]
        assert max(rank[what][1] for rank in ranks) < LIMIT_S


def mended(ctx: Ctx) -> None:
    """The user sees the error, sets what differed, and goes on."""
    mesh = own_mesh(ctx)
    oracle, model = blocks(ctx, mesh), odd_model("a frozen layer", mesh, odd=ctx.rank == 1)
    model.compile(backend="graphshard", options={"fallback": "warn"})
    caught(lambda: losses(model, ctx, range(1)))
    model.blocks[2].requires_grad_(True)
    expected, actual = losses(oracle, ctx, range(2)), losses(model, ctx, range(2))
    assert all(map(torch.equal, expected, actual))
    assert len(graphshard.plans(model)) == 1
    (record,) = root_states_under(model)
    for group in (live.fsdp for live in record.groups):
        assert signature_of(group, mesh_rows(group)).shard_ranks == (tuple(range(ctx.world_size)),)


def test_the_ranks_go_on_when_the_difference_is_gone(pool: Pool) -> None:
    pool.run(2, mended)


def other_mesh(ctx: Ctx) -> tuple[str, float]:
    """Rank 1 shards over fewer ranks than rank 0 believes."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
    model = blocks(ctx, DeviceMesh.from_group(groups[ctx.rank == 1], ctx.device.type))
    model.compile(backend="graphshard", options={"fallback": "warn"})
    return caught(lambda: losses(model, ctx, range(1)))


def test_other_meshes(pool: Pool) -> None:
    ranks = pool.run(3, other_mesh)
    text = "GS702: the ranks of the model's mesh are (0, 1, 2) on rank 0; (0, 1) on rank 1"
    assert [found for found, _ in ranks] == [text] * 3
    assert max(took_s for _, took_s in ranks) < LIMIT_S


# -- options ---------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "replan_after": ({"replan_after": 3}, "replan_after is 0 on rank 0; 3 on rank 1"),
    "verify": ({"verify": "every"}, "verify is compile on rank 0; every on rank 1"),
    "nothing verified": ({"verify": "off"}, "verify is compile on rank 0; off on rank 1"),
    "overlap": (
        {"overlap_optimizer": True},
        "overlap_optimizer is False on rank 0; True",
    ),
    "budget": ({"memory_budget": "1GiB"}, "memory_budget is None on rank 0; 1073741824 on rank 1"),
    "fallback": ({"fallback": "error"}, "fallback is warn on rank 0; error on rank 1"),
    "micro_steps": ({"micro_steps": 2}, "micro_steps is 1 on rank 0; 2 on rank 1"),
}


def other_options(ctx: Ctx) -> dict[str, tuple[str, float]]:
    found = {}
    for what, (options, _) in OPTIONS.items():
        model = blocks(ctx, own_mesh(ctx))
        model.compile(backend="graphshard", options=options if ctx.rank == 1 else None)
        found[what] = caught(lambda model=model: losses(model, ctx, range(1)))
        assert_clean(model)
    return found


def test_options_that_differ_are_named(pool: Pool) -> None:
    ranks = pool.run(2, other_options, timeout_s=250)
    for what, (_, text) in OPTIONS.items():
        assert len({rank[what][0] for rank in ranks}) == 1, [rank[what] for rank in ranks]
        assert f"GS708: all ranks need the same options: {text}" in ranks[0][what][0]
        assert max(rank[what][1] for rank in ranks) < LIMIT_S


def disabled(ctx: Ctx, how: str, everywhere: bool) -> tuple[str, float]:
    """GRAPHSHARD_DISABLE on rank 1 only, or on all ranks."""
    mesh = own_mesh(ctx)
    oracle, model = blocks(ctx, mesh), blocks(ctx, mesh)
    expected = losses(oracle, ctx, range(2))
    if everywhere or ctx.rank == 1:
        os.environ["GRAPHSHARD_DISABLE"] = "1"
    try:
        run: Any = model
        if how == "in place":
            model.compile(backend="graphshard")
        elif how == "wrapped":
            run = torch.compile(model, backend="graphshard")
        else:
            run = torch.compile(lambda x: model(x), backend="graphshard")
    finally:
        os.environ.pop("GRAPHSHARD_DISABLE", None)
    if everywhere:
        began = time.monotonic()
        assert all(map(torch.equal, expected, losses(run, ctx, range(2))))
        return "", time.monotonic() - began
    found = caught(lambda: losses(run, ctx, range(1)))
    assert_clean(model)
    return found


@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_graphshard_disabled_on_one_rank(pool: Pool, how: str) -> None:
    ranks = pool.run(2, disabled, how, False)
    text = "GS708: all ranks need the same options: GRAPHSHARD_DISABLE is False on rank 0; True"
    assert len({found for found, _ in ranks}) == 1
    assert ranks[0][0].startswith(text)
    assert max(took_s for _, took_s in ranks) < LIMIT_S


@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_graphshard_disabled_on_all_ranks(pool: Pool, how: str) -> None:
    assert max(took_s for _, took_s in pool.run(2, disabled, how, True)) < LIMIT_S


def not_compiled(ctx: Ctx) -> tuple[str, float]:
    """Rank 1 is in a collective of its own, as if it ran the model without torch.compile."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    model = blocks(ctx, DeviceMesh.from_group(group, ctx.device.type))
    model.compile(backend="graphshard")
    if ctx.rank == 1:
        dist.barrier()
        return caught(lambda: losses(model, ctx, range(1)))  # it comes after all
    (record,) = prepared(model)
    for ballot in record.ballots:
        assert ballot.group_limit_s == 60.0  # of its process group, less than the store's
        ballot.group_limit_s = 1.0
    found = caught(lambda: losses(model, ctx, range(1)))
    dist.barrier()
    return found


def prepared(model: Any) -> Any:
    from graphshard.capture.root_state import prepare
    from graphshard.fsdp2 import state_of

    prepare(state_of(model))
    return root_states_under(model)


def test_a_rank_that_never_compiles_is_waited_for_as_its_collectives_are(pool: Pool) -> None:
    (found, took_s), (late, _) = pool.run(2, not_compiled)
    assert late == found
    assert found.startswith("GS704: rank 1 did not come to its first compiled call of blocks.0, ")
    assert took_s < LIMIT_S


# -- errors reach every rank whole -----------------------------------------------------------------


SHORT = Shortage(
    2**21, 3 * 2**20, 2**22, Direction.FORWARD, Step(StepKind.COMPUTE, None, 0, 2), (), (), ()
)


def infeasible_on_one(ctx: Ctx) -> tuple[str, str]:
    """The budget is the same, but rank 1's plan is said not to fit."""
    from graphshard.compiler import planning
    from graphshard.errors import InfeasibleBudget

    def boom(*args: Any, **kwargs: Any) -> Any:
        raise InfeasibleBudget(SHORT)

    model = blocks(ctx, own_mesh(ctx))
    model.compile(backend="graphshard")
    original = planning.PLACEMENT
    if ctx.rank == 1:
        planning.PLACEMENT = (boom,)
    try:
        with pytest.raises(graphshard.GraphshardError) as error:
            losses(model, ctx, range(1))
        with pytest.raises(graphshard.GraphshardError, match=error.value.code):
            losses(model, ctx, range(1))
    finally:
        planning.PLACEMENT = original
    assert_clean(model)
    return type(error.value).__name__, str(error.value)


def test_a_rank_that_stops_stops_the_others(pool: Pool) -> None:
    first, second = pool.run(2, infeasible_on_one)
    own = f"GS601: {shortage_text(SHORT)}"
    assert "a memory budget of 2.0 MiB; the least feasible peak is 3.0 MiB" in own
    assert second == ("InfeasibleBudget", own)
    assert first[0] == "DivergedRanks"
    assert first[1].startswith("GS709: rank 1 stopped while it compiled graph ")
    assert first[1].endswith(own)


LAUNCH = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.fsdp import fully_shard
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
if rank == 1:
    model[1].requires_grad_(False)
fully_shard(model).compile(backend="graphshard", options={"compute": "aten"})
model(torch.ones(2, 8)).sum().backward()
"""


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_host_of_the_store_leaves_after_the_others_know(tmp_path: Path) -> None:
    """Rank 0 hosts the store, and ends with the error at once."""
    script, port = tmp_path / "train.py", str(free_port())
    script.write_text(LAUNCH)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [run.communicate(timeout=150)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for text in texts:
        last = text.strip().splitlines()
        raised = [line for line in last if "graphshard.errors." in line]
        assert raised, text
        assert "graphshard.errors.DivergedRanks: GS702: FSDP2 itself would" in raised[-1]
        assert "requires_grad is True on rank 0; False on rank 1" in raised[-1]
