"""One rank, and meshes that only replicate: compute reads the shards where they are."""

from typing import Any

import pytest
import torch
from parity import parity_case
from pool import Ctx, Pool
from small_llama import CONFIG, sharded, steps_of
from torch import nn

import graphshard
from bench.models import make_batch
from bench.peaks import resident_bytes, step_peaks
from graphshard.capture.root_state import handle_of

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", ["llama", "moe", "encdec"])
def test_models_equal_eager_fsdp2(pool: Pool, name: str) -> None:
    pool.run(1, parity_case, name, "one rank", 5, {}, timeout_s=120)


def rooms_of(model: nn.Module) -> list[Any]:
    handle = handle_of(model)
    assert handle is not None
    return [buffer for live in handle.root_state.groups for buffer in live.buffers.values()]


def memory(ctx: Ctx) -> tuple[float, float, int]:
    """Peak of a step in bytes: of FSDP2, and of graphshard; and what it predicted."""

    def peak_bytes(model: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        step = step_peaks(lambda: model(*make_batch(CONFIG, ctx.rank)).backward())
        return step.allocated_bytes + resident_bytes(optimizer)

    oracle, model = sharded(ctx), sharded(ctx)
    losses, params, optimizer = steps_of(oracle, ctx, 3)
    eager_bytes = peak_bytes(oracle, optimizer)
    model.compile(backend="graphshard", options={"fallback": "error", "memory_budget": "1GiB"})
    same_losses, same_params, optimizer = steps_of(model, ctx, 3)
    assert all(map(torch.equal, losses, same_losses))
    assert all(map(torch.equal, params, same_params))
    assert rooms_of(model) == [], "nothing was gathered"
    (plan,) = graphshard.plans(model)
    return eager_bytes, peak_bytes(model, optimizer), plan.summary().peak_bytes


def test_nothing_is_copied_and_the_plan_knows(pool: Pool) -> None:
    ((eager_bytes, own_bytes, planned_bytes),) = pool.run(1, memory, timeout_s=120)
    assert own_bytes < eager_bytes
    assert own_bytes == pytest.approx(planned_bytes, rel=0.01)
