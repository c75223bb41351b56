"""A small transformer with dropout in bfloat16: AOTAutograd rounds it otherwise than eager does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 5
DIM, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    model.compile(backend="graphshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (2, 9), generator=generator)
        said = model(words[:, :-1]).float().flatten(0, 1)
        nn.functional.cross_entropy(said, words[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
