"""Inputs that are subclasses of Tensor: images that know their metadata, beside plain tensors.

Assumed: a graph is compiled for the types of its inputs, and later calls of it have the same
(`compiler/subclass_inputs.py`); a group's inputs pass through views where one of them has a
`__torch_function__` of its own (`capture/boundary.py`). Drawn are the kinds of two inputs of each
call, whether they require grad, and what the blocks are given. Eager FSDP2 is the oracle, bit by
bit, types and metadata included. `GRAPHSHARD_SUBCLASSES=50 GRAPHSHARD_SUBCLASSES_SEED=1` draws more
than CI's 3.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard

pytestmark = pytest.mark.dist

COUNT = int(os.environ.get("GRAPHSHARD_SUBCLASSES", "3"))
SEED = os.environ.get("GRAPHSHARD_SUBCLASSES_SEED")
WIDTH, ROWS = 8, 4


class Described(Tensor):
    """Knows no more than its type."""


class Meta(Tensor):
    """Hands its metadata on to whatever is computed of it, as MONAI's does."""

    meta: str = ""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        found = [a.meta for a in args if isinstance(a, Meta)]
        if isinstance(result, Meta) and found:
            result.meta = found[0]
        return result


KINDS = {
    "plain": lambda x: x,
    "described": lambda x: x.as_subclass(Described),
    "meta": lambda x: _noted(x.as_subclass(Meta)),
}


def _noted(x: Meta) -> Meta:
    x.meta = "seen"
    return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x + self.down(torch.relu(self.up(x)))) * y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, y)
        return self.head(x)


Call = tuple[str, str, bool]
# Of two subclasses torch computes nothing.
kinds = [(a, b) for a in KINDS for b in KINDS if a == b or "plain" in (a, b)]
calls = st.lists(
    st.builds(
        lambda pair, requires_grad: (*pair, requires_grad), st.sampled_from(kinds), st.booleans()
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.timeout((COUNT + 4) * 60)
def test_equals_eager(pool: Pool) -> None:
    @drawing(COUNT, SEED)
    @given(calls)
    @example([("described", "plain", False), ("described", "plain", True)])
    @example([("meta", "plain", True), ("plain", "meta", False)])
    @example([("plain", "plain", False), ("plain", "described", False)])
    def compare(case: list[Call]) -> None:
        pool.run(2, compared, case, timeout_s=60.0)

    compare()


def built(ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Model().to(ctx.device)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


def compared(ctx: Ctx, case: list[Call]) -> None:
    oracle, model = built(ctx), built(ctx)
    model.compile(backend="graphshard", options={"compute": "aten", "fallback": "error"})
    for number, (first, second, requires_grad) in enumerate(case):
        seen = []
        for net in (oracle, model):
            torch.manual_seed(2 * number + ctx.rank)
            leaves = [torch.randn(ROWS, WIDTH, device=ctx.device) for _ in range(2)]
            leaves = [leaf.requires_grad_(requires_grad) for leaf in leaves]
            output = net(KINDS[first](leaves[0]), KINDS[second](leaves[1]))
            output.square().sum().backward()
            grads = [p.grad.to_local() for p in net.parameters()]
            seen.append((output, [*grads, *(leaf.grad for leaf in leaves if requires_grad)]))
            net.zero_grad()
        (want, wanted), (got, found) = seen
        assert type(got) is type(want), (number, type(want), type(got))
        assert getattr(got, "meta", None) == getattr(want, "meta", None), number
        assert torch.equal(got, want), number
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert torch.equal(one, other), (number, index)
    assert graphshard.explain(model).captured == 4
