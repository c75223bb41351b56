"""A Llama, with experts if its shapes have them, sharded as usual.

In: shapes, a batch, a length. Out: a model sharded with `fully_shard` (float32 parameters, bfloat16
compute, float32 reductions, one group per block and one for the rest) and the inputs of one step,
on the current default device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Sharded = tuple[nn.Module, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Config:
    """The shapes of a model.

    recompute: what backward computes again. "none"; "products" (all but attention and the products
    of matrices); "selective" (every second product too); "alternate" (every second block); "full"
    (each block). num_experts: of each feed-forward; 0: it has none.
    """

    dim: int
    num_layers: int
    num_heads: int
    hidden: int
    num_kv_heads: int = 8
    vocabulary: int = 128_256
    recompute: str = "full"
    num_experts: int = 0
    experts_per_token: int = 2


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
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


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
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """SwiGLU of the experts that a router chooses for each token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        count, wide, narrow = config.num_experts, config.hidden, config.dim
        self.num_chosen = config.experts_per_token
        self.router = nn.Linear(narrow, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, narrow, wide))
        self.up = nn.Parameter(torch.empty(count, narrow, wide))
        self.down = nn.Parameter(torch.empty(count, wide, narrow))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.num_chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), len(self.gate)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        row = order // self.num_chosen
        own = rows[row]
        gate, up = (F.grouped_mm(own, part, offs=ends) for part in (self.gate, self.up))
        mixed = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        mixed = mixed * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, row, mixed).view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = Experts(config) if config.num_experts else FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.compute(x, rope)
        options: dict[str, Any] = {}
        if self.recompute != "full":
            every = 2 if self.recompute == "selective" else 1
            options["context_fn"] = partial(products, every)
        out: Tensor = checkpoint(self.compute, x, rope, use_reentrant=False, **options)
        return out

    def compute(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


def products(every: int) -> Any:
    """Saves attention and every so many products of matrices; backward computes the rest again."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = "scaled_dot_product" in str(op)
        if op in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default):
            save = seen[context.is_recompute] % every == 0
            seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def of_block(recompute: str, index: int) -> str:
    if recompute == "alternate":
        return "full" if index % 2 else "none"
    return recompute


class Llama(nn.Module):
    """Tokens and the tokens to predict, both (batch, length), in; the mean loss out."""

    rope: Tensor
    loss = staticmethod(F.cross_entropy)

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(
            Block(config, of_block(config.recompute, index)) for index in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        half = config.dim // config.num_heads // 2
        self.register_buffer("rope", torch.zeros(2, length, half), persistent=False)
        self.tp_plan = None if config.num_experts else tensor_plan()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        logits = self.head(self.norm(x))
        return self.loss(logits.flatten(0, 1).float(), targets.flatten())


def tensor_plan() -> dict[str, ParallelStyle]:
    """Tensor parallel: columns, then rows, of attention and feed-forward; between them each rank
    has a part of the sequence. The loss sees all logits."""
    sequence = Shard(1)
    gathered = PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate())
    with_rope = PrepareModuleInput(
        input_layouts=(sequence, None), desired_input_layouts=(Replicate(), None)
    )
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=sequence)
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": with_rope,
        **{f"attention.{name}": columns for name in ("query", "key", "value")},
        "attention.out": rows,
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gathered,
        **{f"feed_forward.{name}": columns for name in ("gate", "up")},
        "feed_forward.down": rows,
    }
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        **{f"layers.*.{name}": style for name, style in of_block.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }


def placement(parameter: nn.Parameter) -> Shard:
    """There are fewer experts than ranks: each expert is sharded, not their list."""
    return Shard(1 if parameter.dim() > 2 else 0)


def sharded(config: Config, batch: int, seq: int) -> Sharded:
    model = Llama(config, seq)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, shard_placement_fn=placement)
    fully_shard(model, mp_policy=policy)
    tokens, targets = torch.randint(config.vocabulary, (2, batch, seq))
    return model, (tokens, targets)
