"""Llama 3 in the shapes of 8B, 70B and 405B, for planning without weights:

    graphshard plan examples/llama.py:llama3_70b --world 512 --hw h100-ib400

Each function returns a model sharded with `fully_shard` and the inputs of one step. It is called on
the meta device, so nothing is allocated. The settings are the usual ones: float32 parameters,
bfloat16 compute, float32 reductions, one group per block and one for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


@dataclass(frozen=True, slots=True)
class Config:
    """Shapes of the Llama 3 models (arXiv 2407.21783, table 3).

    recompute: "none", "selective" (every second matrix product is computed again in backward, and
    all that is cheap) or "full" (each block again).
    """

    dim: int
    num_layers: int
    num_heads: int
    hidden: int
    num_kv_heads: int = 8
    vocabulary: int = 128_256
    recompute: str = "full"


LLAMA3_8B = Config(4_096, 32, 32, 14_336, recompute="selective")
LLAMA3_70B = Config(8_192, 80, 64, 28_672)
LLAMA3_405B = Config(16_384, 126, 128, 53_248)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.repeats = config.num_heads // config.num_kv_heads
        narrow = config.num_kv_heads * self.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, narrow, bias=False)
        self.value = nn.Linear(config.dim, narrow, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        query = rotate(self.query(x).unflatten(-1, heads), rope)
        key = rotate(self.key(x).unflatten(-1, heads), rope)
        value = self.value(x).unflatten(-1, heads)
        key, value = (part.repeat_interleave(self.repeats, dim=2) for part in (key, value))
        parts = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by the angle of its position, in float32."""
    cos, sin = rope[0, :, None], rope[1, :, None]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.type_as(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.compute(x, rope)
        options: dict[str, Any] = {}
        if self.recompute == "selective":
            options["context_fn"] = every_second_product
        return checkpoint(self.compute, x, rope, use_reentrant=False, **options)

    def compute(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.feed_forward_norm(x))


def every_second_product() -> Any:
    """Saves attention and every second matrix product; backward computes the rest again."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = "scaled_dot_product" in str(op)
        if op is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            save = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Tokens and the tokens to predict, both (batch, length), in; the mean loss out."""

    rope: Tensor

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        half = config.dim // config.num_heads // 2
        self.register_buffer("rope", torch.zeros(2, length, half), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def sharded(config: Config, batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = Llama(config, seq)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    tokens, targets = torch.randint(config.vocabulary, (2, batch, seq))
    return model, (tokens, targets)


def llama3_8b(batch: int = 2, seq: int = 8_192) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return sharded(LLAMA3_8B, batch, seq)


def llama3_70b(batch: int = 1, seq: int = 8_192) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return sharded(LLAMA3_70B, batch, seq)


def llama3_405b(batch: int = 1, seq: int = 8_192) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return sharded(LLAMA3_405B, batch, seq)
