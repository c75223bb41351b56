"""The models that are measured, in plain torch: Llama-style, causal attention, SwiGLU, no dropout;
with experts, each of them takes the tokens that like it best (Zhou et al. 2022).

In: the name of a configuration and a seed. Out: a model on the CPU in float32, and batches of
random tokens. The same seed gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Config:
    dim: int
    num_layers: int
    num_heads: int
    hidden: int
    vocabulary: int
    seq_len: int
    batch: int = 1
    experts: int = 0  # of each block, instead of its feed-forward layer
    breaks: bool = False  # Dynamo stops after each block


CONFIGS = {
    "S": Config(256, 8, 4, 704, 1024, 512),  # 6.9 M parameters
    "CUT": Config(256, 8, 4, 704, 1024, 512, breaks=True),
    "WIDE": Config(512, 4, 8, 1408, 1024, 256),  # 13.9 M
    "MOE": Config(256, 4, 4, 352, 1024, 512, experts=8),  # 10.2 M
    "DEMO": Config(256, 8, 8, 704, 256, 128, batch=4),  # as examples/train.py
    "XS": Config(128, 4, 2, 384, 512, 512),  # 1.0 M
    "XXS": Config(32, 2, 2, 64, 64, 16),  # for tests
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each expert takes as many tokens as if all were divided among them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        inwards, outwards = (config.dim, config.hidden), (config.hidden, config.dim)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(config.experts, *size) * size[0] ** -0.5)
            for size in (inwards, inwards, outwards)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        affinity = self.router(tokens).softmax(dim=-1).T
        weight, chosen = affinity.topk(len(tokens) // len(affinity), dim=-1)
        taken = tokens[chosen]
        inner = F.silu(taken @ self.gate) * (taken @ self.up)
        out = inner @ self.down * weight.unsqueeze(-1)
        mixed = torch.zeros_like(tokens).index_add(0, chosen.flatten(), out.flatten(0, 1))
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = Experts(config) if config.experts else FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


@torch._dynamo.disable
def tell(x: Tensor) -> None:
    """What a logger or a progress bar is to Dynamo."""


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.breaks = config.breaks
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                tell(x)
        return self.head(self.norm(x))


class WithLoss(nn.Module):
    """The loss belongs to what is measured and planned, so it belongs to the model."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def make_model(config: Config, num_ranks: int, seed: int = 0) -> WithLoss:
    """The model as all `num_ranks` emulated ranks hold it: each one's shard equals rank 0's.

    So a gathered parameter has, before the first optimizer step, the values that it has here.
    """
    torch.manual_seed(seed)
    model = WithLoss(Llama(config))
    with torch.no_grad():
        for param in model.parameters():
            shard_len = -(-len(param) // num_ranks)
            param.copy_(param[torch.arange(len(param)) % shard_len])
    return model


def make_batch(config: Config, step: int) -> tuple[Tensor, Tensor]:
    """Tokens of a step, and the tokens to predict."""
    generator = torch.Generator().manual_seed(1 + step)
    shape = (2, config.batch, config.seq_len)
    tokens, targets = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, targets
