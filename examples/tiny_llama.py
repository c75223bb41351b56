"""A byte-level Llama-style language model: RMSNorm, RoPE, causal attention, SwiGLU, untied head.

`build` is the whole recipe for FSDP2: construct on the meta device, shard, allocate, initialise.
Nothing in this file knows about graphshard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCABULARY = 256  # one token per byte value


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    dim: int
    num_layers: int
    seq_len: int
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % self.head_dim:
            raise ValueError(f"dim must be a multiple of {self.head_dim}, got {self.dim}")


def rope_table(seq_len: int, head_dim: int, device: torch.device | str) -> Tensor:
    """cos and sin of every (position, frequency) angle: shape (2, seq_len, head_dim / 2)."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 10_000.0 ** (-steps / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) of a head by the angle of its position."""
    cos, sin = rope[0], rope[1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection decides how much of the other one passes."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = 64 * math.ceil(config.dim * 8 / 3 / 64)
        self.gate = nn.Linear(config.dim, hidden, bias=False)
        self.up = nn.Linear(config.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens (batch, length <= seq_len) in, next-byte logits (batch, length, 256) out."""

    rope: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        table = rope_table(config.seq_len, config.head_dim, "meta")
        self.register_buffer("rope", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.norm(x))


def build(config: LlamaConfig, mesh: DeviceMesh, seed: int) -> Llama:
    """A model sharded over `mesh`, one group per block and one for the rest, initialised."""
    with torch.device("meta"):
        model = Llama(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    reset_parameters(model, seed)
    return model


@torch.no_grad()
def reset_parameters(model: Llama, seed: int) -> None:
    """The same values for every world size and device: drawn whole, on the CPU, then sharded."""
    config = model.config
    model.rope.copy_(rope_table(config.seq_len, config.head_dim, model.rope.device))
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        # The layers that write to the residual stream start smaller the deeper the model is.
        deep = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        std = 0.02 / math.sqrt(2 * config.num_layers) if deep else 0.02
        whole = torch.ones(param.shape)
        if param.dim() > 1:
            nn.init.normal_(whole, std=std, generator=generator)
        device = param.device_mesh.device_type
        param.copy_(distribute_tensor(whole.to(device), param.device_mesh, param.placements))


@torch.no_grad()
def generate(
    model: Llama, prompt: bytes, num_bytes: int, seed: int, advance: Callable[[], None]
) -> str:
    """`prompt` continued. Every rank has to call this: each call of the model gathers parameters.

    The model always sees a window of seq_len bytes, so that one graph serves all lengths: what is
    right of the last byte is padding, and causal attention does not look at it.
    """
    seq_len, device = model.config.seq_len, model.rope.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        recent = text[-seq_len:]
        window = recent + [0] * (seq_len - len(recent))
        logits = model(torch.tensor([window], device=device))[0, len(recent) - 1]
        chances = torch.softmax(logits.cpu() / 0.8, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
        advance()
    return bytes(text).decode("utf-8", errors="replace")
