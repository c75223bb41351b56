"""Collectives that go from and to where tensors are, on real ranks.

gloo takes many tensors in one collective, too; only that it copies them inside, for which
graphshard does not use it so. Here it is told to.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_contract
import test_parity
import torch
from contract_rows import ROWS
from models import CASES
from parity import assert_equal, build, count_collectives, train, twin
from pool import Ctx, Pool
from test_memory import patched, poison_released
from test_parity import STRICT

from graphshard.fsdp2 import group
from graphshard.runtime import buckets, gather_buffers, reduce

pytestmark = pytest.mark.dist

# What changes the collectives, or what travels in them; GRAPHSHARD_ALL_ROWS=1 runs all.
WORDS = (
    "unshard()",
    "=2` of 4",
    "sync",
    "all_reduce",
    "factor",
    "custom",
    "bf16",
    "uneven",
    "tied",
)


def rows() -> list[Any]:
    every = "GRAPHSHARD_ALL_ROWS" in os.environ
    found = [r for r in ROWS if every or any(word in r.name for word in WORDS)]
    return [row for row in found if not row.needs_cuda and test_contract.is_installed(row)]


@contextmanager
def in_place() -> Iterator[None]:
    with patched(group, "COPYING_BACKENDS", lambda names: ()):
        yield


def case_in_place(ctx: Ctx, case: Callable[..., Any], *args: Any) -> Any:
    with in_place():
        return case(ctx, *args)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_models_equal_eager_fsdp2(pool: Pool, name: str, ranks: int) -> None:
    case = test_parity.parity_case
    pool.run(ranks, case_in_place, case, name, "in place", 5, {}, timeout_s=280)


def test_micro_steps(pool: Pool) -> None:
    case = test_parity.parity_case
    pool.run(2, case_in_place, case, "llama", "in place", 3, {"micro_steps": 3})


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_contract_holds(pool: Pool, row: Any) -> None:
    if row.since > test_contract.TORCH:
        pytest.skip(f"torch {row.since} brought it")
    pool.run(row.ranks, case_in_place, test_contract.row_case, row.name, timeout_s=120)


def copies(ctx: Ctx) -> list[str]:
    """What is copied in a step of a model of which nothing is padded or cast."""
    case = CASES["llama"]
    oracle, model = twin(case, ctx)
    copied: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copied.append(original.__name__)
            return original(*args, **kwargs)

        return call

    with in_place():
        model.compile(backend="graphshard", **STRICT)
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
    return copied


def test_nothing_is_packed(pool: Pool) -> None:
    assert pool.run(2, copies) == [[], []]


def test_sums_of_two_only_where_bits_count(pool: Pool) -> None:
    """Where more than two numbers are added, their order depends on their place in a buffer."""
    for copied in pool.run(4, copies):
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

    with in_place(), patched(buckets, "gather_in_place", refusing):
        model.compile(backend="graphshard", **STRICT)
        assert_equal(train(oracle, case, ctx, 3), train(model, case, ctx, 3))
    assert len(asked) == len([m for m in model.modules() if hasattr(m, "unshard")])


def test_a_backend_may_refuse(pool: Pool) -> None:
    pool.run(2, refused)


class LateWork:
    """A collective that only runs when somebody waits for it."""

    def __init__(self, issue: Callable[[], Any]) -> None:
        self.wait = lambda: issue().wait()


def late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Until the wait, outputs are NaN and inputs have to stay what they are."""

    def call(outputs: Any, inputs: Any, *rest: Any) -> LateWork:
        places = {output.untyped_storage().data_ptr() for output in outputs}
        own = [t.clone() if t.untyped_storage().data_ptr() in places else t for t in inputs]
        for output in outputs:
            output.fill_(float("nan"))
        return LateWork(lambda: original(outputs, own, *rest))

    return call


def poisoned(ctx: Ctx, name: str) -> None:
    case, numbers = CASES[name], []
    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 10)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> LateWork:
            numbers.append(len(args[0]))
            return late(original)(*args)

        return call

    with (
        in_place(),
        patched(buckets, "gather_in_place", counted),
        patched(reduce, "reduce_in_place", counted),
        patched(gather_buffers, "free", poison_released),
    ):
        model.compile(backend="graphshard", **STRICT)
        assert_equal(expected, train(model, case, ctx, 10))
    assert sum(numbers) > 0


@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac", "encdec", "moe"])
def test_missing_wait_or_use_after_release_would_show(pool: Pool, name: str) -> None:
    pool.run(2, poisoned, name)


def early_use(ctx: Ctx) -> bool:
    """The poison bites: without a wait that counts, the loss is NaN."""
    case = CASES["llama"]
    model = build(case, ctx)

    def no_wait(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> LateWork:
            work = late(original)(*args)
            work.wait = lambda: None
            return work

        return call

    with in_place(), patched(buckets, "gather_in_place", no_wait):
        model.compile(backend="graphshard", **STRICT)
        loss = case.loss(model, case.batch(0, ctx.rank, ctx.device))
    return bool(torch.isnan(loss))


def test_the_poison_bites(pool: Pool) -> None:
    assert all(pool.run(2, early_use))


@pytest.fixture(scope="module")
def inductor() -> Iterator[Pool]:
    with Pool("inductor") as workers:
        yield workers


@pytest.mark.parametrize("ranks", [2, 4])
def test_by_inductor(inductor: Pool, ranks: int) -> None:
    case = test_parity.parity_case
    inductor.run(ranks, case_in_place, case, "llama", "in place", 5, {}, timeout_s=300)
