"""Gathered parameters: how much is alive, what backward gets, and use outside the life time."""

from typing import Any

import pytest
import torch
from gathered import watch_gathered
from models import CASES
from parity import FSDP2_ORDER, build, count_collectives, reseed, train, twin
from patching import in_place, patched
from poison import poison
from pool import Ctx, Pool
from torch.distributed.fsdp import FSDPModule

import graphshard
from graphshard.runtime import buckets

pytestmark = pytest.mark.dist


def gathered_peaks(ctx: Ctx, name: str, reshard: bool | None) -> dict[str, int]:
    case = CASES[name]
    model = build(case, ctx, **({} if reshard is None else {"reshard_after_forward": reshard}))
    model.compile(backend="graphshard", **FSDP2_ORDER)
    train(model, case, ctx, 1)
    plan = graphshard.plans(model)[0]
    with watch_gathered() as seen:
        reseed(ctx, 1)
        loss = case.loss(model, case.batch(1, ctx.rank, ctx.device))
        after_forward = seen.alive_bytes()
        loss.backward()
        after_backward = seen.alive_bytes()
    with watch_gathered() as alone, torch.no_grad():
        case.loss(model, case.batch(1, ctx.rank, ctx.device))
    sizes = [g.gathered_bytes for g in plan.groups if g.fqn != "(root)"]
    root = sum(g.gathered_bytes for g in plan.groups if g.fqn == "(root)")
    return {
        "peak": seen.peak_bytes,
        "planned": plan.gathered_peak_bytes(),
        "after_forward": after_forward,
        "after_backward": after_backward,
        "forward_alone": alone.peak_bytes,
        "after_evaluation": alone.alive_bytes(),
        "root": root,
        "all": root + sum(sizes),
        "neighbours": sum(sorted(sizes)[-2:]),
    }


@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac", "encdec"])
def test_two_neighbours_and_the_root_at_most(pool: Pool, name: str) -> None:
    for seen in pool.run(2, gathered_peaks, name, None):
        long_lived = seen["root"] + (seen["neighbours"] if name != "llama" else 0)
        assert 0 < seen["peak"] <= seen["neighbours"] + long_lived
        assert seen["peak"] <= seen["planned"]
        assert 0 < seen["forward_alone"] <= seen["neighbours"] + long_lived
        assert seen["after_backward"] == 0


@pytest.mark.parametrize("reshard", [None, True, False])
def test_only_groups_that_are_not_resharded_cross_to_backward(
    pool: Pool, reshard: bool | None
) -> None:
    for seen in pool.run(2, gathered_peaks, "llama", reshard):
        crossing = {None: seen["root"], True: 0, False: seen["all"]}[reshard]
        assert seen["after_forward"] == crossing
        assert seen["after_backward"] == 0
        # As in FSDP2: the next batch finds it.
        assert seen["after_evaluation"] == (seen["all"] if reshard is False else 0)


def early_use(ctx: Ctx) -> bool:
    """Without the wait, the loss is NaN."""
    if ctx.world_size == 1:
        return True
    case = CASES["llama"]
    model = build(case, ctx)
    model.compile(backend="graphshard", **FSDP2_ORDER)

    def no_wait(original: Any) -> Any:
        def call(*args: Any) -> Any:
            work = poison(original)(*args)
            work.wait = work.work.wait
            return work

        return call

    batch = case.batch(0, ctx.rank, ctx.device)
    case.loss(model, batch)
    with in_place(model, False), patched(buckets, "all_gather", no_wait):
        loss = case.loss(model, batch)
    return bool(torch.isnan(loss))


def test_the_poison_bites(pool: Pool) -> None:
    assert all(pool.run(2, early_use))


def evaluated(ctx: Ctx) -> list[int]:
    """All-gathers of 3 evaluations, with a write that no version counts before the third."""
    case = CASES["llama"]
    oracle, model = twin(case, ctx, reshard_after_forward=False)
    model.compile(backend="graphshard", **FSDP2_ORDER)
    batch, gathered = case.batch(0, ctx.rank, ctx.device), []
    with torch.no_grad():
        for number in range(3):
            if number == 2 and ctx.rank == 0:
                for own in (oracle, model):
                    own.head.weight.to_local().data.mul_(2)
            with count_collectives() as counts:
                loss = case.loss(model, batch)
            assert torch.equal(loss, case.loss(oracle, batch))
            for module in oracle.modules():  # eager FSDP2 would not see the write
                if isinstance(module, FSDPModule):
                    module.reshard()
            gathered.append(counts.all_gather)
    return gathered


def test_what_stays_gathered_between_evaluations_is_not_gathered_again(pool: Pool) -> None:
    for first, *others in pool.run(2, evaluated):
        assert first > 0
        assert others == [0, 1]
