"""What a group's forward is given: the same tensor twice, tensors in containers, some not used.

FSDP2 passes all inputs that require grad through one autograd node (`capture/boundary.py`).
Assumed: the node is in the graph as in FSDP2, so that gradients add up in its order, also where a
repeated block is traced once; an input that nothing uses gets zeros where eager gives zeros, and
nothing where eager gives nothing; containers are the same objects, or copies, as FSDP2 has them.
Drawn are the inputs of the blocks, which of them are used, what they come in and what else reads
them. Eager FSDP2 is the oracle, bit by bit.
`GRAPHSHARD_INPUTS=50 GRAPHSHARD_INPUTS_SEED=1` draws more than CI's 4.
"""

import os
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import graphshard

pytestmark = pytest.mark.dist

COUNT = int(os.environ.get("GRAPHSHARD_INPUTS", "4"))
SEED = os.environ.get("GRAPHSHARD_INPUTS_SEED")
WIDTH, ROWS, STEPS = 8, 4, 2

Pair = namedtuple("Pair", "first rest")


@dataclass
class Record:
    number: int
    first: Tensor
    rest: Any


BOXES: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "arguments": lambda *values: (values, {}),
    "by name": lambda *values: (values[:1], {f"v{i}": v for i, v in enumerate(values[1:])}),
    "list": lambda *values: ((list(values),), {}),
    "dict": lambda *values: (({str(-i): v for i, v in enumerate(values)}, 3), {}),
    "ordered": lambda *values: ((), {"box": OrderedDict(enumerate(values))}),
    "named tuple": lambda first, *rest: ((Pair(first, [*rest]),), {}),
    "dataclass": lambda first, *rest: ((Record(7, first, tuple(rest)),), {}),
    "nested": lambda first, *rest: ((first, [{"a": rest}, (), None]), {"key": (first,)}),
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Record):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


@dataclass(frozen=True)
class Inputs:
    """given: what each block is given, by name; used: whether the block uses it. skips: what goes
    into a block is used after it as well. cut: nothing but the other inputs gives a gradient to
    what is before the first block."""

    given: tuple[str, ...]
    used: tuple[bool, ...]
    box: str = "arguments"
    blocks: int = 3
    skips: bool = False
    mixed: bool = False
    checkpointed: bool = False
    cut: bool = False


class Block(nn.Module):
    def __init__(self, used: Sequence[bool]) -> None:
        super().__init__()
        self.used = used
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in used)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values = list(tensors_in((args, kwargs)))
        out = values[0] * 2
        for value, used, way in zip(values, self.used, self.ways, strict=False):
            if used:
                out = out + F.gelu(way(value)) * value
        return torch.tanh(out)


class Model(nn.Module):
    def __init__(self, case: Inputs) -> None:
        super().__init__()
        self.case = case
        self.embedding, self.memory, self.other, self.head = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.blocks = nn.ModuleList(Block(case.used) for _ in range(case.blocks))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embedding(x)
        memory, (half, _) = self.memory(x), self.other(x).repeat(1, 2).chunk(2, dim=1)
        skipped = []
        if self.case.cut:
            x = x.detach()
        for block in self.blocks:
            values = {"x": x, "first": first, "memory": memory, "half": half, "none": x.detach()}
            args, kwargs = BOXES[self.case.box](x, *(values[name] for name in self.case.given[1:]))
            skipped.append(x)
            if self.case.checkpointed:
                x = checkpoint(block, *args, use_reentrant=False, **kwargs)
            else:
                x = block(*args, **kwargs)
        if self.case.skips:
            x = x + sum(skipped)
        return self.head(x)


names = st.sampled_from(["x", "first", "memory", "half", "none"])
pairs = st.lists(st.tuples(names, st.booleans()), min_size=1, max_size=3)
inputs = st.builds(
    lambda pairs, **other: Inputs(
        ("x", *(name for name, _ in pairs)), (True, *(used for _, used in pairs)), **other
    ),
    pairs,
    box=st.sampled_from(sorted(BOXES)),
    blocks=st.integers(1, 4),
    skips=st.booleans(),
    mixed=st.booleans(),
    checkpointed=st.booleans(),
    cut=st.booleans(),
)
THRICE, UNUSED = ("x", "x", "x"), ("x", "memory", "half")


@pytest.mark.timeout((COUNT + 8) * 60)
def test_equals_eager(pool: Pool) -> None:
    @drawing(COUNT, SEED)
    @given(inputs)
    @example(Inputs(THRICE, (True,) * 3))
    @example(Inputs(THRICE, (True,) * 3, "by name", skips=True, mixed=True))
    @example(Inputs(UNUSED, (True, False, False)))
    @example(Inputs(UNUSED, (True, True, False), "dataclass", checkpointed=True))
    @example(Inputs(("x", "first", "x"), (True,) * 3, "named tuple", skips=True))
    def compare(case: Inputs) -> None:
        pool.run(2, compared, case, timeout_s=60.0)

    compare()


def built(ctx: Ctx, case: Inputs) -> nn.Module:
    torch.manual_seed(0)
    model = Model(case).to(ctx.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.mixed else None
    given = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, **given)
    return fully_shard(model, mesh=ctx.mesh, **given)


@pytest.mark.parametrize("cut", [False, True])
def test_close_to_eager_with_inductor(pool: Pool, cut: bool) -> None:
    """cut: some gradients are zeros whatever the loss is, and no tangent leads to them."""
    case = Inputs(UNUSED, (True, False, False), cut=cut)
    pool.run(2, compared, case, "inductor", timeout_s=120.0)


def compared(ctx: Ctx, case: Inputs, compute: str = "aten") -> None:
    model = follows(ctx, lambda: built(ctx, case), compute)
    assert graphshard.explain(model).captured == case.blocks + 1


def follows(ctx: Ctx, build: Callable[[], nn.Module], compute: str = "aten") -> nn.Module:
    """The compiled twin of an eager model, after steps of both; Inductor's is close to it."""
    oracle, model = build(), build()
    model.compile(backend="graphshard", options={"compute": compute, "fallback": "error"})
    equal = torch.equal if compute == "aten" else partial(torch.allclose, rtol=1e-4, atol=1e-5)
    assert_equal_steps(ctx, oracle, model, equal)
    return model


def assert_equal_steps(
    ctx: Ctx,
    oracle: nn.Module,
    model: nn.Module,
    equal: Callable[[Tensor, Tensor], bool],
) -> None:
    for step in range(STEPS):
        torch.manual_seed(2 * step + ctx.rank)
        x = torch.randn(ROWS, WIDTH, device=ctx.device)
        losses = [net(x).square().mean() for net in (oracle, model)]
        assert equal(*losses), f"step {step}: {losses}"
        for loss in losses:
            loss.backward()
        for (name, want), got in zip(oracle.named_parameters(), model.parameters(), strict=True):
            assert (want.grad is None) == (got.grad is None), f"{step}: {name}: {want.grad}"
            if want.grad is not None:
                assert equal(want.grad.to_local(), got.grad.to_local()), f"{step}: {name}"
        for net in (oracle, model):
            torch.optim.SGD(net.parameters(), lr=0.001).step()
            net.zero_grad()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return (x + self.attention(x, x, x, need_weights=False)[0])[0]


def attends(ctx: Ctx) -> None:
    """`nn.MultiheadAttention` projects otherwise if query and key are the same object, which they
    are no more within FSDP2."""

    def built_of() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(Attention() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
        for block in model[:3]:
            fully_shard(block.attention, mesh=ctx.mesh)
        return fully_shard(model.to(ctx.device), mesh=ctx.mesh)

    follows(ctx, built_of)


def test_attention_of_a_tensor_to_itself(pool: Pool) -> None:
    pool.run(2, attends, timeout_s=60.0)


class Noting(Block):
    """Writes to a container that it is given."""

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        out = super().forward(x)
        if isinstance(notes, dict):
            notes[len(notes)] = 1
        else:
            notes.append(out.detach().sum() if len(notes) % 2 else 2)
        return out


class Noted(Model):
    def __init__(self, kind: type) -> None:
        super().__init__(Inputs(("x",), (True,)))
        self.kind = kind
        self.blocks = nn.ModuleList(Noting((True,)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        notes = self.kind()
        for block in self.blocks:
            x = block(x, notes)
        return self.head(x * (1 + len(notes)) + sum(notes))


def noted(ctx: Ctx, kind: type) -> None:
    def built_of() -> nn.Module:
        torch.manual_seed(0)
        model = Noted(kind).to(ctx.device)
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    follows(ctx, built_of)


@pytest.mark.parametrize("kind", [list, dict])
def test_what_a_block_notes_in_a_container(pool: Pool, kind: type) -> None:
    pool.run(2, noted, kind, timeout_s=60.0)
