"""A model that is dropped is freed, and identical models that share a graph have a plan each."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Ctx, Pool, collect_all
from students import WIDTH, in_place, sharded, steps_of, wrapped
from torch import Tensor, nn

import graphshard
from graphshard.capture.root_state import all_root_states
from graphshard.runtime.live import _LIVE

pytestmark = pytest.mark.dist


def by_block(model: Any, **options: Any) -> nn.Module:
    for block in model.blocks:
        in_place(block, **options)
    return model


Way = Callable[..., Any]
WAYS: dict[str, tuple[Way, dict[str, Any], dict[str, Any]]] = {
    "in place": (in_place, {}, {}),
    "unverified": (in_place, {"verify": "off"}, {}),
    "every": (in_place, {"verify": "every"}, {}),
    "wrapped": (wrapped, {}, {}),
    "by block": (by_block, {}, {}),
    "pairs": (in_place, {}, {"pairs": True}),
    "replanned": (in_place, {"replan_after": 2}, {}),
    "overlapped": (in_place, {"overlap_optimizer": True}, {}),
    "budget": (in_place, {"memory_budget": "1GiB"}, {}),
}


def dropped(ctx: Ctx, name: str) -> list[tuple[bool, int, int]]:
    """After each of three models: was it freed, and how many records and groups are left."""
    way, options, how = WAYS[name]
    left = []
    for trains in (False, True, True):
        model = sharded(ctx, **how)
        steps_of(way(model, **options), model, ctx, 4, trains=trains)
        assert graphshard.explain(model).captured >= 2
        freed = weakref.ref(model)
        del model
        gc.collect()
        left.append((freed() is None, len(all_root_states()), len(_LIVE)))
    return left


def dropped_in_every_way(ctx: Ctx) -> dict[str, list[tuple[bool, int, int]]]:
    collect_all()
    found = {}
    for name in WAYS:
        torch._dynamo.reset()
        found[name] = dropped(ctx, name)
    return found


def test_a_dropped_model_is_freed_without_a_reset(pool: Pool) -> None:
    for found in pool.run(2, dropped_in_every_way, timeout_s=240):
        assert found == {name: [(True, 0, 0)] * 3 for name in WAYS}


def backward_without_the_model(ctx: Ctx) -> list[Tensor]:
    """The gradients of a loss whose model was dropped between forward and backward."""
    collect_all()
    grads = []
    for prepare in (in_place, lambda model: model):
        torch.manual_seed(0)
        model = sharded(ctx)
        params = list(model.parameters())
        loss = prepare(model)(torch.ones(4, WIDTH)).square().mean()
        del model
        gc.collect()
        loss.backward()
        grads.append(torch.cat([p.grad.to_local().flatten() for p in params]))  # type: ignore[union-attr]
    del loss, params
    gc.collect()
    assert not len(_LIVE)
    return grads


def test_a_loss_outlives_its_model(pool: Pool) -> None:
    for ours, eager in pool.run(2, backward_without_the_model):
        assert torch.equal(ours, eager)
