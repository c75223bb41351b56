"""The models that parity is tested on: small, but each with what makes its kind hard for a backend.

A `Case` is a recipe: `build()` gives a fresh unsharded module, `shard(model, mesh, **kwargs)`
applies FSDP2 (the keyword arguments go to every `fully_shard`), `batch(step, rank, device)` gives
inputs that differ per step and rank, and `loss(model, batch)` is one forward up to the scalar loss.
`check(model)` runs after a training step and asserts what the case promises about it. All of it is
picklable by name. Dimensions of 7, 101 and 5 rows leave uneven and (on 4 ranks) empty shards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HEADS, DEPTH, LENGTH, BATCH = 101, 32, 4, 4, 12, 2
CLASSES = EXPERTS = 7

Batch = tuple[Tensor, ...]


def _nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shard: Callable[..., nn.Module]
    batch: Callable[[int, int, torch.device], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    check: Callable[[nn.Module], None] = _nothing
    ragged: bool = False  # ranks have other sizes, hence other predictions


# -- parts -----------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rope_table(dim: int, length: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(length), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    """Attention of `x` over `memory` (itself by default), with rotary positions if given."""

    def __init__(self, dim: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        causal: bool = False,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(x if memory is None else memory).unflatten(-1, (2 * self.heads, -1))
        k, v = kv.transpose(1, 2).chunk(2, 1)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(dim: int, dropout: float = 0.0) -> nn.Sequential:
    up, down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
    return nn.Sequential(up, nn.GELU(), down, nn.Dropout(dropout))


def rng(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 + 100 * step + rank)


def text_batch(step: int, rank: int, device: torch.device) -> Batch:
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=rng(step, rank)).to(device)
    return text[:, :-1], text[:, 1:]


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the last tensor of the batch, given all before it."""
    *inputs, target = batch
    return F.cross_entropy(model(*inputs).flatten(0, -2), target.flatten())


def shard_blocks(
    lists: tuple[str, ...], model: nn.Module, mesh: DeviceMesh, **kwargs: Any
) -> nn.Module:
    """One group per module in the named lists, and the root for the rest."""
    for name in lists:
        for block in model.get_submodule(name).children():
            fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


# -- llama -----------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        hidden = 3 * dim - 1  # 95 rows
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=True, rope=(cos, sin))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(LlamaBlock(DIM, HEADS) for _ in range(depth))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        cos, sin = rope_table(DIM // HEADS, 4 * LENGTH)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


# -- gpt with tied embeddings ----------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(DIM, HEADS, bias=True)
        self.dropout = nn.Dropout(dropout)
        self.mlp = mlp(DIM, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), causal=True))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, checkpointed: bool = False, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(LENGTH, DIM)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.position(where))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def shard_gpt(model: GPT, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    fully_shard([model.embed, model.head], mesh=mesh, **kwargs)
    return shard_blocks(("blocks",), model, mesh, **kwargs)


# -- convolutional net -----------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.stages = nn.ModuleList([Stage(5, 14, 1), Stage(14, 21, 2), Stage(21, 28, 2)])
        self.head = nn.Linear(28, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def image_batch(step: int, rank: int, device: torch.device) -> Batch:
    g = rng(step, rank)
    images = torch.randn(4, 3, 12, 12, generator=g)
    return images.to(device), torch.randint(CLASSES, (4,), generator=g).to(device)


# -- encoder-decoder -------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(DIM, HEADS, bias=True), mlp(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.cross = (
            Attention(DIM, HEADS, bias=True),
            Attention(DIM, HEADS, bias=True),
        )
        self.mlp = mlp(DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class EncDec(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.source_position, self.target_position = (
            nn.Embedding(LENGTH, DIM),
            nn.Embedding(LENGTH, DIM),
        )
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(depth + 1))
        self.memory_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source) + self.source_position.weight[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.memory_norm(memory)
        x = self.embed(target) + self.target_position.weight[: target.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(self.norm(x))


def pair_batch(step: int, rank: int, device: torch.device) -> Batch:
    source, _ = text_batch(step, rank + 50, device)
    return (source[:, :-3], *text_batch(step, rank, device))


# -- mixture of experts ----------------------------------------------------------------------------


class MoE(nn.Module):
    """Top-k routing with a capacity per expert: each expert computes only the tokens it got.

    A token beyond an expert's capacity is dropped; an unused slot holds a zero row and comes back
    with weight zero, so an expert without tokens has a gradient of zeros. `load` keeps how many
    tokens asked for each expert in the last forward.
    """

    def __init__(self, dim: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim, False), nn.SiLU(), nn.Linear(2 * dim, dim, False))
            for _ in range(EXPERTS)
        )
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count = tokens.shape[0]
        capacity = -(-2 * self.top_k * count // EXPERTS)
        gate, choice = self.router(tokens).softmax(-1).topk(self.top_k, -1)
        slot, order = self.slots(choice.flatten(), capacity)
        unused = torch.full((EXPERTS * capacity + 1,), count, device=x.device)
        source = unused.scatter(0, slot, order // self.top_k)[:-1]
        weight = gate.new_zeros(EXPERTS * capacity + 1).scatter(0, slot, gate.flatten()[order])[:-1]
        routed = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]).index_select(0, source)
        results = [e(rows) for e, rows in zip(self.experts, routed.split(capacity), strict=True)]
        y = torch.zeros_like(tokens[:1]).repeat(count + 1, 1)
        return y.index_add(0, source, torch.cat(results) * weight[:, None])[:-1].view_as(x)

    def slots(self, choice: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Assignments by expert: the slot of each (the last slot takes what is dropped), order."""
        expert, order = choice.sort(stable=True)
        load = (expert[:, None] == torch.arange(EXPERTS, device=choice.device)).sum(0)
        self.load.copy_(load)
        place = torch.arange(choice.numel(), device=choice.device) - (load.cumsum(0) - load)[expert]
        return torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity), order


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(DIM), RMSNorm(DIM)
        self.attention, self.moe = Attention(DIM, HEADS), MoE(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        return x + self.moe(self.norm2(x))


class MoEModel(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(MoEBlock() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def narrow_batch(step: int, rank: int, device: torch.device) -> Batch:
    """Text over three tokens, other ones per step and rank: few experts are asked for on each."""
    g = rng(step, rank)
    words = torch.randperm(VOCAB, generator=g)[:3]
    text = words[torch.randint(3, (BATCH, LENGTH + 1), generator=g)].to(device)
    return text[:, :-1], text[:, 1:]


def expert_loads(model: nn.Module) -> list[list[int]]:
    """Per mixture layer, how many tokens of the last forward asked for each expert on this rank."""
    return [module.load.tolist() for module in model.modules() if isinstance(module, MoE)]


def assert_starved(model: nn.Module) -> None:
    loads = expert_loads(model)
    asked = BATCH * LENGTH * 2
    assert all(sum(load) == asked for load in loads), f"{loads} do not add up to {asked}"
    assert any(0 in load for load in loads), f"every expert got a token on this rank: {loads}"


# -- all -------------------------------------------------------------------------------------------

_BLOCKS = partial(shard_blocks, ("blocks",))
_LAYERS = partial(shard_blocks, ("encoder", "decoder"))

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama", Llama, _BLOCKS, text_batch, token_loss),
        Case("gpt_tied", GPT, shard_gpt, text_batch, token_loss),
        Case("gpt_tied_ac", partial(GPT, checkpointed=True), shard_gpt, text_batch, token_loss),
        Case("convnet", ConvNet, partial(shard_blocks, ("stages",)), image_batch, token_loss),
        Case("encdec", EncDec, _LAYERS, pair_batch, token_loss),
        Case("moe", MoEModel, _BLOCKS, narrow_batch, token_loss, assert_starved),
    )
}


def of_depth(name: str, depth: int) -> Case:
    """The case with so many blocks."""
    case = CASES[name]
    return replace(case, build=partial(case.build, depth=depth))
