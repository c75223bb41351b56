"""`CPUOffloadPolicy` on a device with memory of its own: in graphs, with eager FSDP2's bits.

On a CPU the host's memory stands for the device's as well (`on_host.as_if_apart`), and gradients
really travel in a thread; with GRAPHSHARD_TEST_DEVICE=cuda all of it is real.
"""

from typing import Any

import pytest
import torch
from models import CASES
from on_host import as_if_apart, policy
from parity import assert_equal, backward_twice, build, difference, train
from patching import in_place, patched
from pool import Ctx, Pool, capped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graphshard.capture.root_state import handle_of
from graphshard.fsdp2.versions import TORCH
from graphshard.runtime import host_copies, reduce

pytestmark = pytest.mark.dist
FULL_REDUCE = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def offloaded(ctx: Ctx, name: str, **how: Any) -> nn.Module:
    """Built with its parameters on the host, as FSDP2 wants them."""
    return build(CASES[name], ctx, offload_policy=policy(ctx.device.type), **how)


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    how = {"fallback": "error", **options}
    model.compile(backend="graphshard", fullgraph=True, options=how)
    return model


def lives_of(model: nn.Module) -> Any:
    handle = handle_of(model)
    assert handle is not None
    return handle.root_state.groups


def host_rank(
    ctx: Ctx, name: str, how: dict[str, Any], micro_steps: int, options: dict[str, Any]
) -> int:
    """How many copies of gradients travelled."""
    case, copies = CASES[name], []

    def counted(original: Any) -> Any:
        def offload(*args: Any, **kwargs: Any) -> Any:
            copies.append(original(*args, **kwargs))
            return copies[-1]

        return offload

    with as_if_apart(), patched(reduce, "offload", counted):
        expected = train(offloaded(ctx, name, **how), case, ctx, 3, micro_steps=micro_steps)
        model = compiled(offloaded(ctx, name, **how), **options)
        assert_equal(expected, train(model, case, ctx, 3, micro_steps=micro_steps))
        assert all(live.fsdp.is_on_host for live in lives_of(model))
        assert not any(live.root.to_host for live in lives_of(model))
    return len(copies)


@pytest.mark.parametrize(
    ("name", "how", "micro_steps", "options"),
    [
        ("llama", {}, 1, {}),
        ("llama", {"reshard_after_forward": False}, 2, {"schedule": "fsdp2"}),
        ("llama", {"mp_policy": FULL_REDUCE}, 2, {}),
        ("gpt_tied_ac", {}, 1, {"overlap_optimizer": True}),
        ("moe", {"mp_policy": FULL_REDUCE}, 1, {}),
    ],
    ids=["plain", "kept, 2 micro-steps", "bf16, 2 micro-steps", "overlapped optimizer", "moe"],
)
def test_equals_eager_fsdp2(
    pool: Pool, name: str, how: dict[str, Any], micro_steps: int, options: dict[str, Any]
) -> None:
    first, *others = pool.run(2, host_rank, name, how, micro_steps, options)
    assert first > 0
    assert [first] * len(others) == others


def test_one_rank(pool: Pool) -> None:
    """No collective, and the copies all the same."""
    (copies,) = pool.run(1, host_rank, "llama", {}, 1, {})
    assert copies > 0


def hybrid(ctx: Ctx) -> None:
    shape = (2, ctx.world_size // 2)
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))
    case = CASES["llama"]

    def sharded() -> nn.Module:
        torch.manual_seed(0)
        model = case.build().to(ctx.device)
        return case.shard(model, mesh, offload_policy=policy(ctx.device.type))

    with as_if_apart():
        expected = train(sharded(), case, ctx, 2)
        assert_equal(expected, train(compiled(sharded()), case, ctx, 2))


def test_hybrid(pool: Pool) -> None:
    pool.run(2, hybrid)


def accumulated(ctx: Ctx) -> None:
    """A gradient is added to one that the host has; and without a wait in between, twice."""
    case = CASES["llama"]
    with as_if_apart():
        expected = backward_twice(offloaded(ctx, "llama"), case, ctx)
        actual = backward_twice(compiled(offloaded(ctx, "llama")), case, ctx)
    problems = [difference(a, b) for a, b in zip(expected, actual, strict=True)]
    assert not any(problems), problems


def test_gradients_add_up_on_the_host(pool: Pool) -> None:
    pool.run(2, accumulated)


def stepped_in_backward(ctx: Ctx) -> None:
    """Whoever is told that a gradient is there finds it there."""
    case = CASES["llama"]

    def losses_of(model: nn.Module) -> list[float]:
        def step(param: nn.Parameter) -> None:
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.1)
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        found = []
        for number in range(4):
            loss = case.loss(model, case.batch(number, ctx.rank, ctx.device))
            loss.backward()
            found.append(float(loss))
        return found

    # With pinned memory eager FSDP2 calls hooks before gradients are there (torch 2.11).
    pins = ctx.device.type == "cuda" and TORCH >= (2, 13)
    how = {"offload_policy": CPUOffloadPolicy(pin_memory=pins)}
    with as_if_apart():
        expected = losses_of(build(case, ctx, **how))
        assert losses_of(compiled(build(case, ctx, **how))) == expected


def test_an_optimizer_in_backward(pool: Pool) -> None:
    pool.run(2, stepped_in_backward)


def gathered_in_place(ctx: Ctx) -> None:
    """Shards that come from the host go where the result will be."""
    case = CASES["llama"]
    with as_if_apart():
        expected = train(offloaded(ctx, "llama", mp_policy=FULL_REDUCE), case, ctx, 4)
        model = compiled(offloaded(ctx, "llama", mp_policy=FULL_REDUCE))
        case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
        model.zero_grad()
        with in_place(model):
            assert_equal(expected, train(model, case, ctx, 4))


def test_gathers_in_place(pool: Pool) -> None:
    pool.run(2, gathered_in_place)


def a_copy_fails(ctx: Ctx) -> None:
    """The step raises, all is SHARDED, and the next one is right."""
    case, fails = CASES["llama"], [False]

    def failing(original: Any) -> Any:
        def copy(queue: Any, pairs: Any) -> Any:
            if fails[0]:
                raise MemoryError("the host is full")
            return original(queue, pairs)

        return copy

    kind = host_copies.ThreadQueue if ctx.device.type == "cpu" else host_copies.StreamQueue
    with as_if_apart(), patched(kind, "copy", failing):
        expected = train(offloaded(ctx, "llama"), case, ctx, 2)
        model = compiled(offloaded(ctx, "llama"))
        loss = case.loss(model, case.batch(0, ctx.rank, ctx.device))
        fails[0] = True
        with pytest.raises(MemoryError, match="the host is full"):
            loss.backward()
        fails[0] = False
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert not any(live.root.to_host for live in lives_of(model))
        model.zero_grad()
        assert_equal(expected, train(model, case, ctx, 2))


def test_a_copy_that_fails_loses_nothing(pool: Pool) -> None:
    pool.run(2, a_copy_fails)


def on_the_device(ctx: Ctx) -> tuple[int, int]:
    """Bytes that a model keeps on the device between steps, eager and compiled."""
    case, kept = CASES["llama"], []
    for how in (lambda model: model, compiled):
        before = torch.cuda.memory_allocated(ctx.device)
        model = how(offloaded(ctx, "llama"))
        train(model, case, ctx, 2)
        kept.append(torch.cuda.memory_allocated(ctx.device) - before)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(p.device.type == "cpu" for p in [*model.parameters(), *grads])
        del model, grads
    return kept[0], kept[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_stays_on_the_device(pool: Pool) -> None:
    for eager_bytes, own_bytes in pool.run(capped(2), on_the_device):
        assert own_bytes <= eager_bytes
