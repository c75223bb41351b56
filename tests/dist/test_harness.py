"""The harness is what every parity claim rests on, so it must be able to fail."""

import os
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, expert_loads
from parity import Trace, assert_equal, build, count_collectives, train, twin
from pool import Ctx, Pool, WorkerError, WorkerTimeout, capped, device_type
from torch import nn

pytestmark = pytest.mark.dist

several_ranks = pytest.mark.skipif(capped(2) < 2, reason="needs two ranks")


# -- the pool --------------------------------------------------------------------------------------


def total(ctx: Ctx, factor: int) -> tuple[int, float]:
    value = torch.tensor(float(factor * (ctx.rank + 1)), device=ctx.device)
    dist.all_reduce(value)
    return os.getpid(), value.item()


def rank_one_fails(ctx: Ctx) -> None:
    if ctx.rank == 1:
        raise ValueError("wheel fell off")
    total(ctx, 1)  # waits for rank 1


def every_rank_fails(ctx: Ctx) -> None:
    raise ValueError(f"nothing works on rank {ctx.rank}")


def rank_zero_hangs(ctx: Ctx) -> None:
    if ctx.rank == 0:
        time.sleep(600)


def rank_zero_dies(ctx: Ctx) -> None:
    if ctx.rank == 0:
        os._exit(3)
    total(ctx, 1)


def rank_zero_aborts(ctx: Ctx) -> None:
    if ctx.rank == 0:
        os.abort()
    total(ctx, 1)


COMPILED: list[object] = []


def counted(gm: Any, inputs: Any) -> Any:
    COMPILED.append(gm)
    return gm.forward


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def compilations(ctx: Ctx) -> int:
    """In this process so far, with a function that has now been compiled."""
    torch.compile(double, backend=counted)(torch.ones(2))
    return len(COMPILED)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order_from_processes_that_stay(pool: Pool) -> None:
    ranks = capped(2)
    first, second = pool.run(2, total, 1), pool.run(2, total, 10)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == ranks
    assert [value for _, value in second] == [10.0 * sum(range(1, ranks + 1))] * ranks


def test_only_cases_that_keep_what_was_compiled_find_it() -> None:
    with Pool() as workers:
        kept = [workers.run(1, compilations, keeps_compiled=True) for _ in range(2)]
        own = [workers.run(1, compilations) for _ in range(2)]
    assert (kept, own) == ([[1], [1]], [[2], [3]])


@several_ranks
def test_every_failing_rank_is_reported_with_its_traceback() -> None:
    with Pool() as pool:
        with pytest.raises(WorkerError, match=r"failed on ranks \[0, 1\] of 2") as both:
            pool.run(2, every_rank_fails)
        for rank in (0, 1):
            assert f"ValueError: nothing works on rank {rank}" in str(both.value)
        start = time.monotonic()
        with pytest.raises(WorkerError) as one:
            pool.run(2, rank_one_fails)
        assert time.monotonic() - start < 30, "the other rank's collective was waited for"
        assert "ValueError: wheel fell off" in str(one.value)
        assert "in rank_one_fails" in str(one.value)


@several_ranks
def test_hang_and_death_are_killed_and_the_next_case_works() -> None:
    with Pool() as pool:
        before = [pid for pid, _ in pool.run(2, total, 1)]
        start = time.monotonic()
        with pytest.raises(
            WorkerTimeout, match=r"ranks \[0\] of 2 did not finish within 2 s"
        ) as hang:
            pool.run(2, rank_zero_hangs, timeout_s=2)
        assert time.monotonic() - start < 5
        assert "in rank_zero_hangs" in str(hang.value), "the message should show where the rank was"
        assert not any(alive(pid) for pid in before)
        with pytest.raises(WorkerError, match=r"the process died \(exit code 3\)"):
            pool.run(2, rank_zero_dies)
        with pytest.raises(WorkerError, match=r"exit code -6\)(.|\n)*in rank_zero_aborts"):
            pool.run(2, rank_zero_aborts)
        after = [pid for pid, _ in pool.run(2, total, 1)]
        assert not set(before) & set(after)
        assert all(alive(pid) for pid in after)
    assert not any(alive(pid) for pid in after), "closing the pool left workers behind"
    assert pool.pids() == []


# -- parity ----------------------------------------------------------------------------------------


def eager_equals_eager(ctx: Ctx, name: str) -> dict[str, object]:
    case = CASES[name]
    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 3)
    assert_equal(expected, train(model, case, ctx, 3))
    other = train(build(case, ctx), case, ctx, 3, seed=1)  # other dropout masks
    alive = {
        n
        for grads in expected.grads
        for n, grad in grads.items()
        if grad is not None and grad.any()
    }
    return {
        "dead": sorted({n for n, value in expected.params.items() if value.numel()} - alive),
        "missing": [n for n, grad in expected.grads[0].items() if grad is None],
        "masks_matter": not all(map(torch.equal, expected.losses, other.losses)),
        "loads": expert_loads(oracle),
        "buffers": len(expected.buffers),
    }


@pytest.mark.parametrize("name", CASES)
def test_eager_equals_eager_and_every_parameter_trains(pool: Pool, name: str) -> None:
    for seen in pool.run(2, eager_equals_eager, name):
        assert [name for name in seen["dead"] if ".experts." not in name] == []
        assert seen["missing"] == []
        assert seen["masks_matter"] == name.startswith("gpt")
        assert bool(seen["buffers"]) == (name in ("llama", "convnet", "moe"))


def four_ranks(ctx: Ctx, name: str) -> list[str]:
    case = CASES[name]
    oracle, model = twin(case, ctx, reshard_after_forward=False)
    expected = train(oracle, case, ctx, 2, micro_steps=2)
    assert_equal(expected, train(model, case, ctx, 2, micro_steps=2))
    assert len(expected.losses) == 4
    return [name for name, value in expected.params.items() if value.numel() == 0]


@pytest.mark.skipif(capped(4) < 4, reason="needs four ranks")
def test_four_ranks_with_an_empty_shard_and_micro_steps(pool: Pool) -> None:
    *_, last = pool.run(4, four_ranks, "convnet")
    assert "stem.0.weight" in last


@several_ranks
def test_some_experts_get_no_token_on_one_rank_only(pool: Pool) -> None:
    loads = [seen["loads"] for seen in pool.run(2, eager_equals_eager, "moe")]
    pairs = [pair for layers in zip(*loads, strict=True) for pair in zip(*layers, strict=True)]
    assert any(min(pair) == 0 < max(pair) for pair in pairs), loads
    assert any(min(pair) > 0 for pair in pairs), loads


def local_expert_gradients(ctx: Ctx) -> None:
    """Without FSDP: the gradient of an expert is a tensor of zeros if it got no token, else not."""
    case = CASES["moe"]
    torch.manual_seed(0)
    model = case.build().to(ctx.device)
    case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
    for block, load in zip(model.blocks, expert_loads(model), strict=True):
        for expert, tokens in zip(block.moe.experts, load, strict=True):
            assert [bool(p.grad.any()) for p in expert.parameters()] == [tokens > 0] * 2


def test_expert_without_tokens_has_zero_gradient(pool: Pool) -> None:
    pool.run(2, local_expert_gradients)


def counting_backend() -> Any:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow: only where needed

    return CompileCounterWithBackend("aot_eager")


def graphs_of_unsharded(ctx: Ctx, name: str) -> int:
    if ctx.rank:
        return 1  # one process is enough
    case = CASES[name]
    model = case.build().to(ctx.device)
    backend = counting_backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(2):
        case.loss(compiled, case.batch(step, ctx.rank, ctx.device)).backward()
        case.check(model)
    return backend.frame_count


@pytest.mark.parametrize("name", CASES)
def test_unsharded_model_is_one_graph(pool: Pool, name: str) -> None:
    assert set(pool.run(2, graphs_of_unsharded, name)) == {1}


def bump(trace: Trace, what: str) -> str:
    """Change one element by one unit in the last place; returns what the message must name."""
    step, name = 1, "blocks.1.down.weight"
    target = {
        "loss": trace.losses[step],
        "gradient": trace.grads[step][name],
        "parameter": trace.params[name],
    }[what]
    flat = target.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))
    return {
        "loss": "step 1, loss",
        "gradient": f"step 1, gradient of {name}",
        "parameter": f"final parameter {name}",
    }[what]


def one_ulp_is_seen(ctx: Ctx) -> None:
    case = CASES["llama"]
    trace = train(build(case, ctx), case, ctx, 2)
    assert_equal(trace, deepcopy(trace))
    for what in ("loss", "gradient", "parameter"):
        changed = deepcopy(trace)
        with pytest.raises(AssertionError, match=f"{bump(changed, what)}: max abs diff .*, 1 of "):
            assert_equal(trace, changed)
    changed = deepcopy(trace)
    changed.grads[0]["head.weight"] = None
    with pytest.raises(
        AssertionError, match=r"step 0, gradient of head.weight: expected a tensor, got None"
    ):
        assert_equal(trace, changed)
    del changed.buffers["cos"]
    with pytest.raises(
        AssertionError, match=r"in one of the two runs only: \['final buffer cos'\]"
    ):
        assert_equal(trace, changed)


def test_one_ulp_is_seen(pool: Pool) -> None:
    pool.run(2, one_ulp_is_seen)


# -- collectives -----------------------------------------------------------------------------------


def eager_counts(ctx: Ctx, reshard: bool | None, sync: bool) -> tuple[int, int]:
    case = CASES["llama"]
    model = build(case, ctx, reshard_after_forward=reshard)
    model.set_requires_gradient_sync(sync)
    with count_collectives() as counts:
        case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
    assert counts.order[0] == "all_gather"
    assert len(counts.order) == counts.all_gather + counts.reduce_scatter
    return counts.all_gather, counts.reduce_scatter


@several_ranks
@pytest.mark.parametrize(
    ("reshard", "sync", "expected"),
    [(True, True, (10, 5)), (None, True, (9, 5)), (False, True, (5, 5)), (None, False, (9, 0))],
)
def test_eager_collectives(
    pool: Pool, reshard: bool | None, sync: bool, expected: tuple[int, int]
) -> None:
    assert pool.run(2, eager_counts, reshard, sync) == [expected] * 2


def every_way_to_a_collective(ctx: Ctx) -> tuple[int, int]:
    x, y = torch.ones(4, device=ctx.device), torch.empty(4 * ctx.world_size, device=ctx.device)
    with count_collectives() as counts:
        dist.all_gather_into_tensor(y, x)
        dist.all_gather_into_tensor(y, x, async_op=True).wait()
        ctx.mesh.get_group()._allgather_base(y, x).wait()
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(
                x, ctx.world_size, ctx.mesh.get_group().group_name
            )
        )
        dist.reduce_scatter_tensor(x, y)
        dist.reduce_scatter_tensor(x, y, async_op=True).wait()
    return counts.all_gather, counts.reduce_scatter


def test_every_way_to_a_collective_counts_once(pool: Pool) -> None:
    assert set(pool.run(2, every_way_to_a_collective)) == {(4, 2)}


def counted_under_compile(ctx: Ctx) -> tuple[int, int]:
    """Counting does not keep Dynamo from compiling."""
    backend = counting_backend()
    model = torch.compile(nn.Linear(4, 4).to(ctx.device), backend=backend, fullgraph=True)
    with count_collectives() as counts:
        model(torch.ones(2, 4, device=ctx.device)).sum().backward()
    return backend.frame_count, len(counts.order)


def test_counting_leaves_compilation_alone(pool: Pool) -> None:
    assert set(pool.run(2, counted_under_compile)) == {(1, 0)}


def device_of(ctx: Ctx) -> str:
    return next(build(CASES["llama"], ctx).parameters()).device.type


def test_device_is_the_one_asked_for(pool: Pool) -> None:
    assert set(pool.run(2, device_of)) == {device_type()}
