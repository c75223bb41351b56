"""Small sharded models on the meta device, and studies of them."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard.cost.presets import preset
from graphshard.offline.api import machine_of
from graphshard.offline.counted import costs_key
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Study
from graphshard.offline.target import made_of, target_of
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.problem import PlanningPolicy

EXAMPLES = Path(__file__).parents[1] / "examples"
HARDWARE = "h100-ib400"
DEPTH = CAPTURED + 2


class Block(nn.Module):
    """A residual block; `mark` is an attribute that nothing reads."""

    def __init__(self, dim=8, mark=None):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)
        self.mark = mark

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """`blocks` in a row, behind and before parameters of the root."""

    def __init__(self, blocks, dim=8):
        super().__init__()
        self.embedding = nn.Embedding(32, dim)
        self.blocks = blocks
        self.head = nn.Linear(dim, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if isinstance(self.blocks, nn.Sequential):
            x = self.blocks(x)
        else:
            found = self.blocks
            for block in found.values() if isinstance(found, nn.ModuleDict) else found:
                x = block(x)
        return self.head(x).logsumexp(-1).mean()


def shard(model, nested=False, **settings):
    found = model.blocks
    for block in found.values() if isinstance(found, nn.ModuleDict) else found:
        if nested:
            fully_shard(block.up, **settings)
        fully_shard(block, **settings)
    fully_shard(model)


def tokens(batch=2, seq=6):
    return torch.zeros(batch, seq, dtype=torch.int64, device="meta")


def net(depth=DEPTH, container=nn.ModuleList, batch=2, seq=6, **settings):
    """What `graphshard plan` gets from a user's function."""
    blocks = [Block() for _ in range(depth)]
    made = container(blocks) if container is not nn.Sequential else container(*blocks)
    model = Net(made)
    shard(model, **settings)
    return model, (tokens(batch, seq),)


class TwoRows(nn.Module):
    """An encoder whose result every block of a decoder reads."""

    def __init__(self, depth):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(depth))
        self.decoder = nn.ModuleList(Block() for _ in range(depth))
        self.mix = nn.Linear(8, 8)

    def forward(self, given):
        memory, x = given, self.mix(given)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x + memory)
        return x.sum()


def two_rows(depth=DEPTH):
    model = TwoRows(depth)
    for block in [*model.encoder, *model.decoder]:
        fully_shard(block)
    fully_shard(model)
    return model, torch.zeros(2, 8)


def named(blocks):
    return nn.ModuleDict({f"block_{n}": block for n, block in enumerate(blocks)})


@functools.cache
def the_example():
    return sys.modules[target_of(f"{EXAMPLES / 'llama.py'}:llama3_8b").function.__module__]


def llama(recompute, depth=DEPTH):
    example = the_example()
    config = example.Config(16, depth, 4, 32, num_kv_heads=2, vocabulary=64, recompute=recompute)
    return example.sharded(config, 1, 16)


def mixtral(recompute, depth=DEPTH):
    example = the_example()
    shapes = {"dim": 16, "num_layers": depth, "num_heads": 4, "hidden": 32, "num_kv_heads": 2}
    config = replace(example.MIXTRAL_8X7B, **shapes, vocabulary=64, recompute=recompute)
    return example.sharded(config, 1, 16)


def point(world=8, sizes=(), *, budget=None, recompute=True, hardware="h100", regroup=False):
    """regroup: compute is compiled, and groups may travel in parts."""
    policy = PlanningPolicy(budget, recompute=recompute, regroup=regroup)
    return Point(world, 8, machine_of(hardware), policy, sizes, fused=regroup)


def study(build, points=(), *, whole=False):
    """A study that has captured. build: keyword sizes -> (model, inputs)."""

    def made(sizes):
        return made_of("net", build(**dict(sizes)))

    return Study("net", made, points or (point(),), whole=whole)


def planned(build, points=(), *, whole=False):
    return [answer.plan for answer in study(build, points, whole=whole).answers()]


def costs(build, *, whole):
    """What the planner sees of the model, from a few blocks or from all of them.

    First of ops as they are, then of compiled compute in parts: both from one capture.
    """
    points = point(), point(regroup=True)
    found = study(build, points, whole=whole)
    found._prepare()
    assert bool(found._repeats) is not whole
    if whole:
        return [costs_of_all(found, point) for point in points]
    return [found._costs[costs_key(point, freed=False)] for point in points]


def costs_of_all(found, point):
    """Costs of a graph with every block in it."""
    placed = found._cut_for(point).parts.placed
    parts = point.in_parts
    return graph_costs(placed, point.machine, recompute=True, fused=parts, parts=parts)


def without_nodes(units):
    """Copies of a block are in no graph, so their ops have no names."""
    return [replace(unit, nodes=(), op="") for unit in units]


def studied(build, *, whole=False):
    """A plan in FSDP2's order, and what it was made from."""
    point = Point(8, 8, preset("h100"), PlanningPolicy(2**60, most_ahead=1))
    study = Study("net", lambda sizes: made_of("net", build()), (point,), whole=whole)
    (answer,) = study.answers()
    return answer.plan, study.posed(point)
