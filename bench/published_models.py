"""The models of published figures, on the meta device, sharded as their publishers did.

In: the family and size of a model, the length, what is computed again, the precision, the mesh.
Out: a sharded model and the inputs of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from graphshard.demo.llama import Config, Llama
from graphshard.demo.models import LLAMA3_8B, LLAMA3_70B

# Llama 2: arXiv 2307.09288 and its published configurations; 34B is Code Llama's, arXiv 2308.12950.
LLAMA = {
    ("llama3", "8b"): LLAMA3_8B,
    ("llama3", "70b"): LLAMA3_70B,
    ("llama2", "7b"): Config(4_096, 32, 32, 11_008, 32, 32_000),
    ("llama2", "13b"): Config(5_120, 40, 40, 13_824, 40, 32_000),
    ("llama2", "34b"): Config(8_192, 48, 64, 22_016, 8, 32_000),
    ("llama2", "70b"): Config(8_192, 80, 64, 28_672, 8, 32_000),
}


# Torchtitan's: every linear but the head, and all-gathers in float8.
FLOAT8 = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def _is_float8(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear) and fqn != "head"


RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class MptConfig:
    """llm-foundry 061f2c7, scripts/train/yamls/pretrain/mpt-*.yaml."""

    dim: int
    num_heads: int
    num_layers: int
    vocabulary: int = 50_368
    recompute: str = "none"


MPT = {
    "1b": MptConfig(2_048, 16, 24),
    "3b": MptConfig(2_560, 20, 32),
    "7b": MptConfig(4_096, 32, 32),
    "13b": MptConfig(5_120, 40, 40),
    "30b": MptConfig(7_168, 56, 48),
    "70b": MptConfig(8_192, 64, 80),
}


class MptBlock(nn.Module):
    def __init__(self, config: MptConfig) -> None:
        super().__init__()
        dim = config.dim
        self.recompute, self.num_heads = config.recompute, config.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (nn.Linear(*s, bias=False) for s in ((dim, 4 * dim), (4 * dim, dim)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """Tokens and targets in, the mean loss out. The head is the embedding's weight."""

    loss = staticmethod(F.cross_entropy)

    def __init__(self, config: MptConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(length, config.dim)
        self.layers = nn.ModuleList(MptBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return self.loss(logits.flatten(0, 1).float(), targets.flatten())


@torch.library.custom_op("published::log_softmax", mutates_args=())
def _log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


@torch.library.custom_op("published::log_softmax_backward", mutates_args=())
def _log_softmax_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten._log_softmax_backward_data(grad, result, -1, result.dtype)


@torch.library.custom_op("published::nll_loss", mutates_args=())
def _nll_loss(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.nll_loss_forward(x, targets, None, 1, -100)


@torch.library.custom_op("published::nll_loss_backward", mutates_args=())
def _nll_loss_backward(grad: Tensor, x: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.aten.nll_loss_backward(grad, x, targets, None, 1, -100, weight)


_log_softmax.register_fake(torch.empty_like)
_log_softmax_backward.register_fake(lambda grad, result: torch.empty_like(grad))
_nll_loss.register_fake(lambda x, targets: (x.new_empty(()), x.new_empty(())))
_nll_loss_backward.register_fake(lambda grad, x, targets, weight: torch.empty_like(x))
_log_softmax.register_autograd(
    lambda ctx, grad: _log_softmax_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
_nll_loss.register_autograd(
    lambda ctx, grad, _: (_nll_loss_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


def loss_left_alone(logits: Tensor, targets: Tensor) -> Tensor:
    """As a script computes it that compiles its blocks only: op by op."""
    return _nll_loss(_log_softmax(logits), targets)[0]


def build(
    family: str,
    model: str,
    seq: int,
    recompute: str,
    precision: str,
    mesh: str,
    compiled_loss: bool,
    batch: int,
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Torchtitan's last block stays gathered until backward; FSDP1's is its root's."""
    with torch.device("meta"):
        net: Llama | Mpt
        if family == "mpt":
            config = replace(MPT[model], recompute=recompute)
            net, vocabulary = Mpt(config, seq), config.vocabulary
        else:
            shape = replace(LLAMA[family, model], recompute=recompute)
            net, vocabulary = Llama(shape, seq), shape.vocabulary
        if not compiled_loss:
            net.loss = loss_left_alone
        tokens, targets = torch.randint(vocabulary, (2, batch, seq))
    reduce_dtype = torch.bfloat16 if precision == "pure" else torch.float32
    if precision == "float8":
        convert_to_float8_training(net, config=FLOAT8, module_filter_fn=_is_float8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    how: dict[str, Any] = {"mp_policy": policy}
    if mesh == "hsdp":
        shape = dist.get_world_size() // RANKS_PER_NODE, RANKS_PER_NODE
        how["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    *others, last = net.layers
    for layer in others:
        fully_shard(layer, **how)
    fully_shard(last, **how, reshard_after_forward=False)
    fully_shard(net, **how)
    return net, (tokens, targets)
