"""Collectives that go from and to where tensors are, on real ranks.

What every model and every row of the contract does so stands in `test_parity.py` and
`test_contract.py`, and with Inductor in `test_inductor.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES
from parity import FSDP2_ORDER, assert_equal, count_collectives, train, twin
from patching import compiled_in_place, patched
from poison import late
from pool import Ctx, Pool, capped

from graphshard.runtime import buckets, reduce

pytestmark = pytest.mark.dist


def copies(ctx: Ctx) -> tuple[list[str], bool]:
    """What is copied in a step of a model of which nothing is padded or cast; whether the loss
    is a number where nobody waits for a gather."""
    case = CASES["llama"]
    oracle, model = twin(case, ctx)
    copied: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copied.append(original.__name__)
            return original(*args, **kwargs)

        return call

    with compiled_in_place():
        model.compile(backend="graphshard", **FSDP2_ORDER)
        train(model, case, ctx, 2)
    with (
        patched(buckets, "_bucket", noted),
        patched(reduce, "_pack", noted),
        count_collectives() as ours,
    ):
        train(model, case, ctx, 1, first_step=2)
    train(oracle, case, ctx, 2)
    with count_collectives() as theirs:
        train(oracle, case, ctx, 1, first_step=2)
    assert (ours.all_gather, ours.reduce_scatter) == (theirs.all_gather, theirs.reduce_scatter)
    with patched(buckets, "gather_in_place", no_wait):
        loss = case.loss(model, case.batch(0, ctx.rank, ctx.device))
    return copied, not torch.isnan(loss)


def no_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        work = late(original)(*args)
        work.wait = lambda: None
        return work

    return call


def test_nothing_is_packed_and_the_poison_bites(pool: Pool) -> None:
    assert pool.run(2, copies) == [([], False)] * 2


def test_sums_of_two_only_where_bits_count(pool: Pool) -> None:
    """Where more than two numbers are added, their order depends on their place in a buffer."""
    if capped(4) < 4:
        pytest.skip("needs 4 ranks")
    for copied, _ in pool.run(4, copies):
        assert copied
        assert set(copied) == {"_pack"}


def refused(ctx: Ctx) -> None:
    """A backend that has no such collective is asked once, and gets buckets from then on."""
    case = CASES["llama"]
    oracle, model = twin(case, ctx)
    asked: list[int] = []

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(outputs: Any, inputs: Any, process_group: Any) -> Any:
            asked.append(len(inputs))
            raise RuntimeError("Backend other does not support allgather_into_tensor_coalesced")

        return call

    with compiled_in_place(), patched(buckets, "gather_in_place", refusing):
        model.compile(backend="graphshard", **FSDP2_ORDER)
        assert_equal(train(oracle, case, ctx, 3), train(model, case, ctx, 3))
    assert len(asked) == len([m for m in model.modules() if hasattr(m, "unshard")])


def test_a_backend_may_refuse(pool: Pool) -> None:
    pool.run(2, refused)
