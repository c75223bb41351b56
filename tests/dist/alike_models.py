"""Models of blocks that are almost alike: each op of a block has variants that differ in one thing.

A block is its ops' names and the variant of each. `OPS[name]` is an op's setup, which runs in the
block's constructor, and its forward; both are given the variant, a number from 0 to 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

BATCH, LENGTH, WIDTH = 2, 4, 8
NUMBERS = (0.5, -1.25, 3.0)


@dataclass(frozen=True)
class BlockSpec:
    """ops: (name, variant), run one after the other on what the block's linear layer gives."""

    ops: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Row:
    """Blocks that follow one another. around: what all of them run in."""

    blocks: tuple[BlockSpec, ...]
    around: str = ""


Forward = Callable[["Block", Tensor, int], Tensor]
OPS: dict[str, tuple[Callable[["Block", int], None] | None, Forward]] = {}


def op(setup: Callable[["Block", int], None] | None = None) -> Callable[[Forward], Forward]:
    def register(forward: Forward) -> Forward:
        OPS[forward.__name__] = (setup, forward)
        return forward

    return register


class Block(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, variant in spec.ops:
            setup = OPS[name][0]
            if setup is not None:
                setup(self, variant)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        x = self.linear(x).to(x.dtype)
        for name, variant in self.ops:
            x = OPS[name][1](self, x, variant)
        return x


class AlmostAlike(nn.Module):
    """turned: where the layout is another one than between blocks, at the "start" in forward, at
    the "end" in backward."""

    def __init__(self, rows: tuple[Row, ...], turned: str) -> None:
        super().__init__()
        self.stem = turned_or_not(turned == "start")
        self.rows = nn.ModuleList(nn.ModuleList(map(Block, row.blocks)) for row in rows)
        self.head = turned_or_not(turned == "end")
        self.arounds = tuple(row.around for row in rows)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for row, around in zip(self.rows, self.arounds, strict=True):
            if around == "no_grad":
                with torch.no_grad():
                    x = run(row, x)
            elif around == "autocast":
                with torch.autocast(x.device.type, dtype=torch.bfloat16):
                    x = run(row, x)
            elif around == "early":  # all blocks read one tensor, each another part
                x = run_parts(row, x)
            else:
                x = run(row, x)
        # AOTAutograd hands a contiguous gradient to what is returned, whatever its layout.
        return self.head(x.to(next(self.head.parameters()).dtype)).contiguous()


class Turned(nn.Conv1d):
    """Of the channels in the last place, with which the result and gradients lie turned."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def turned_or_not(turned: bool) -> nn.Module:
    return Turned(WIDTH, WIDTH, 1) if turned else nn.Linear(WIDTH, WIDTH)


def run(row: nn.ModuleList, x: Tensor) -> Tensor:
    for block in row:
        x = block(x)
    return x


def run_parts(row: nn.ModuleList, x: Tensor) -> Tensor:
    parts = torch.stack([x * (i + 1) for i in range(len(row))], 2)
    for i, block in enumerate(row):
        x = x + block(parts[:, :, i])
    return x


# -- constants -----------------------------------------------------------------------------------


@op()
def constant(block: Block, x: Tensor, v: int) -> Tensor:
    return torch.sin(x) * torch.tensor([NUMBERS[v]] * WIDTH)


@op()
def number(block: Block, x: Tensor, v: int) -> Tensor:
    return x * NUMBERS[v]


@op()
def zero(block: Block, x: Tensor, v: int) -> Tensor:
    return x / (x.abs() + 1) * (0.0, -0.0, 1)[v]


@op(lambda block, v: block.register_buffer("scale", torch.tensor(NUMBERS[v])))
def buffer(block: Block, x: Tensor, v: int) -> Tensor:
    return x * block.scale


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@op(lambda block, v: block.register_buffer("typed", torch.ones(WIDTH, dtype=DTYPES[v])))
def buffer_dtype(block: Block, x: Tensor, v: int) -> Tensor:
    return (x.sin() * block.typed).to(x.dtype)


def _plain(block: Block, v: int) -> None:
    block.plain = torch.full((WIDTH,), NUMBERS[v])


@op(_plain)
def plain_attribute(block: Block, x: Tensor, v: int) -> Tensor:
    return x + block.plain


def _closure(block: Block, v: int) -> None:
    factor = NUMBERS[v]
    block.scaled = lambda x: x * factor


@op(_closure)
def closure(block: Block, x: Tensor, v: int) -> Tensor:
    return block.scaled(x)


# -- bodies of higher-order ops ------------------------------------------------------------------


@op()
def cond(block: Block, x: Tensor, v: int) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * NUMBERS[v], lambda x: x - NUMBERS[v], (x,))


@op()
def cond_other_branch(block: Block, x: Tensor, v: int) -> Tensor:
    return torch.cond(x.sum() > 0, torch.cos, lambda x: torch.sin(x * NUMBERS[v]), (x,))


def halves(x: Tensor) -> Tensor:
    """Two heads. Without gradients: FlexAttention has no backward on the CPU."""
    return x.detach().unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)


@op()
def flex_score(block: Block, x: Tensor, v: int) -> Tensor:
    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + NUMBERS[v] * (query - key)

    heads = halves(x)
    out = flex_attention(heads, heads, heads, score_mod=score)
    return x * out.transpose(1, 2).flatten(-2)


def _mask(block: Block, v: int) -> None:
    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= v

    block.mask = create_block_mask(near, None, None, LENGTH, LENGTH, device="cpu")


@op(_mask)
def flex_mask(block: Block, x: Tensor, v: int) -> Tensor:
    heads = halves(x)
    out = flex_attention(heads, heads, heads, block_mask=block.mask)
    return x * out.transpose(1, 2).flatten(-2)


class Scaled(torch.autograd.Function):
    """Forward is the same for each number, backward is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: float) -> Tensor:
        ctx.number = number
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.number, None


@op()
def only_backward(block: Block, x: Tensor, v: int) -> Tensor:
    return Scaled.apply(x, NUMBERS[v])


POLICIES = (None, [torch.ops.aten.mm.default], [torch.ops.aten.sin.default])


@op()
def checkpointed(block: Block, x: Tensor, v: int) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x) * NUMBERS[0])

    if POLICIES[v] is None:
        return checkpoint(inner, x, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, POLICIES[v])
    return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)


@op()
def vmapped(block: Block, x: Tensor, v: int) -> Tensor:
    return torch.vmap(lambda row: row * NUMBERS[v] + row.sum())(x)


# -- flags, modes, layouts -----------------------------------------------------------------------


@op()
def attention(block: Block, x: Tensor, v: int) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=v == 1, scale=(None, None, 0.5)[v])


@op()
def norm(block: Block, x: Tensor, v: int) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=(1e-5, 1e-1, 1.0)[v])


@op()
def dtype(block: Block, x: Tensor, v: int) -> Tensor:
    return x.to(DTYPES[v]).cos().to(x.dtype)


def _own_layer(block: Block, v: int) -> None:
    """Two uses of one parameter under one autocast are a declared difference."""
    block.cast = nn.Linear(WIDTH, WIDTH, bias=False)


@op(_own_layer)
def autocast(block: Block, x: Tensor, v: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=v == 1):
        return F.linear(x, block.cast.weight.to(x.dtype)).to(x.dtype)


@op()
def no_grad(block: Block, x: Tensor, v: int) -> Tensor:
    with torch.set_grad_enabled(v == 1):
        scale = x.mean()
    return x * scale


@op()
def turn(block: Block, x: Tensor, v: int) -> Tensor:
    mixed = torch.cos(x.transpose(1, 2))
    return (mixed.contiguous() if v == 1 else mixed).transpose(1, 2)


@op()
def strides(block: Block, x: Tensor, v: int) -> Tensor:
    return x.as_strided(x.shape, x.contiguous().stride()) * 2 if v == 1 else x * 2


@op()
def written(block: Block, x: Tensor, v: int) -> Tensor:
    x = x.clone()
    x[:, v] = 0
    return x.mul_(NUMBERS[v])


@op(lambda block, v: block.linear.weight.requires_grad_(v != 1))
def frozen(block: Block, x: Tensor, v: int) -> Tensor:
    return x


@op()
def dropout(block: Block, x: Tensor, v: int) -> Tensor:
    return F.dropout(x, (0.0, 0.25, 0.5)[v], block.training)


# -- hooks ---------------------------------------------------------------------------------------


def _hooked(block: Block, v: int) -> None:
    if v:
        block.linear.register_forward_hook(lambda module, args, out: out * NUMBERS[v])


@op(_hooked)
def hook(block: Block, x: Tensor, v: int) -> Tensor:
    return x


def _hooked_before(block: Block, v: int) -> None:
    if v:
        block.register_forward_pre_hook(lambda module, args: (args[0] * NUMBERS[v],))


@op(_hooked_before)
def pre_hook(block: Block, x: Tensor, v: int) -> Tensor:
    return x
