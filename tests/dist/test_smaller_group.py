"""What eager FSDP2 cannot gather from the smaller group of an int `reshard_after_forward`.

Parameters that are sharded on columns have a graph all the same, with the bits of a gather from all
ranks (`rows_wrong.py`). Groups with all-gather extensions are left to FSDP2, and raise what it
raises. When a test here fails with another torch, FSDP2 may have learned it: then such a group can
have a graph (`graphshard/fsdp2/unsupported.py`, and the table of docs/design.md#fallback).
"""

from functools import partial

import pytest
import torch
from extension_cases import ExtensionCase, Recipe
from extension_cases import build as with_extensions
from pool import Ctx, Pool, capped
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import graphshard
from graphshard.fsdp2.versions import TORCH

pytestmark = [pytest.mark.dist, pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks")]

WIDTH = 6
RAISES = "reshard_after_forward is an int, where FSDP2 itself raises"
EXTENSIONS = {n: f"{n}.up.weight has all-gather extensions and {RAISES}" for n in "012"}

# Before torch 2.13 it makes a parameter of frozen integers, too.
LATER, AT_ONCE = ("backward", "NotImplementedError"), ("forward", "RuntimeError")
FROZEN = LATER if TORCH >= (2, 13) else AT_ONCE


def linears(ctx: Ctx, columns: bool = True) -> nn.Module:
    """The second of three layers has its weight sharded on columns, and its bias on rows."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if columns and param.shape == (WIDTH, 8) else None

    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(*layers).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh, reshard_after_forward=2, shard_placement_fn=placement)
    return fully_shard(model, mesh=ctx.mesh)


def extending(ctx: Ctx, *sends: str, frozen: tuple[int, ...] = ()) -> nn.Module:
    recipe = Recipe(sends, scaled=False, wrapped=True)
    return with_extensions(ExtensionCase(recipe, reshard=2, frozen=frozen), ctx)


MODELS = {
    "rows": partial(linears, columns=False),
    "columns": linears,
    # Integers that travel alone; where they need a gradient, FSDP2 makes a parameter of them.
    "frozen integers": lambda ctx: extending(ctx, "coarse", frozen=(0, 1, 2)),
    "integers": lambda ctx: extending(ctx, "coarse"),
    "several parts": lambda ctx: extending(ctx, "coarse", "rest"),
}


def step(model: nn.Module, ctx: Ctx) -> tuple[str, str]:
    """What raised, and its exception; "" for neither."""
    try:
        loss = model(torch.ones(2, WIDTH, device=ctx.device)).float().square().mean()
    except Exception as error:
        return "forward", type(error).__name__
    try:
        loss.backward()
    except Exception as error:
        return "backward", type(error).__name__
    return "", ""


def steps(ctx: Ctx, name: str) -> tuple[tuple[str, str], tuple[str, str], dict[str, str]]:
    """Of eager FSDP2 and of graphshard, and why groups have no graph there."""
    eager, model = MODELS[name](ctx), MODELS[name](ctx)
    model.compile(backend="graphshard", options={"compute": "aten"})
    return step(eager, ctx), step(model, ctx), dict(graphshard.explain(model).reasons)


@pytest.mark.parametrize(
    ("name", "raised", "left"),
    [
        ("rows", ("", ""), {}),
        ("columns", ("backward", "IndexError"), {}),
        (
            "frozen integers",
            # Before torch 2.13 it makes a parameter of these, too.
            ("backward", "NotImplementedError")
            if TORCH >= (2, 13)
            else ("forward", "RuntimeError"),
            EXTENSIONS,
        ),
        ("integers", ("forward", "RuntimeError"), EXTENSIONS),
        ("several parts", ("forward", "AssertionError"), EXTENSIONS),
    ],
)
def test_what_fsdp2_raises(
    pool: Pool, name: str, raised: tuple[str, str], left: dict[str, str]
) -> None:
    for eager, compiled, reasons in pool.run(4, steps, name):
        assert eager == raised, "eager FSDP2 does something else: read the head of this file"
        assert compiled == (raised if left else ("", ""))
        # Groups beside one that breaks the graph wait for the next call to be compiled alone.
        assert {n: text for n, text in reasons.items() if RAISES in text} == left
        assert bool(reasons) == bool(left)


def asked_for_an_error(ctx: Ctx) -> str:
    model = MODELS["integers"](ctx)
    model.compile(backend="graphshard", options={"compute": "aten", "fallback": "error"})
    with pytest.raises(graphshard.UnsupportedModel) as raised:
        model(torch.ones(2, WIDTH, device=ctx.device))
    return str(raised.value)


def test_with_fallback_error_it_is_said_before_anything_runs(pool: Pool) -> None:
    for text in pool.run(4, asked_for_an_error):
        assert any(reason in text for reason in EXTENSIONS.values())
