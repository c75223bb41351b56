"""A small transformer, and the two graphs that AOTAutograd makes of a training step of it."""

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional

DIM, HEADS = 32, 4


class Toy(nn.Module):
    """Embedding, one block of attention and a feed-forward, head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(101, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.head = nn.Linear(DIM, 101, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (p.transpose(1, 2) for p in parts)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tokens(batch, length):
    return torch.randint(0, 101, (batch, length))


def captured(model, batch, dynamic=False):
    """The forward and the backward graph of one training step."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        return module

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    if dynamic:
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(batch, dim)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(batch).backward()
    torch._dynamo.reset()
    return graphs
