"""Models to tune, settings of them, and what a search finds, for the tests of tuning."""

from functools import partial

import torch
from offline_models import Block, Net, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from graphshard.offline.api import machine_of
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.target import made_of
from graphshard.schedule.setting import (
    Checkpointing,
    Grouping,
    MeshShape,
    Resharding,
    Setting,
)
from graphshard.tune.pricing import Pricer
from graphshard.tune.search import Accumulated, Asked, found_for, present_of, space_of
from graphshard.tune.subject import Machines, Subject

WORLD, PER_NODE = 16, 4
MACHINES = Machines(machine_of("h100-ethernet100"), PER_NODE, False)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# More blocks than are captured, so that the others are counted.
DEPTH = CAPTURED + 2


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def net(depth=4, block=Block, dim=64):
    model = Net(nn.ModuleList(block(dim) for _ in range(depth)), dim)
    model.embedding = nn.Embedding(512, dim)
    return model


def build(sizes, shard_it=None, make=net):
    model = make()
    if shard_it is not None:
        shard_it(model)
    return made_of("net", (model, (tokens(**dict(sizes)),)))


def by_block(model, nested=False, **settings):
    for block in model.blocks:
        if nested:
            fully_shard(block.up, **settings)
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def sizes_of(batch):
    return (("batch", batch), ("seq", 32))


def subject_of(shard_it=by_block, make=net, batches=(1, 2), worlds=(WORLD,), machines=MACHINES):
    made = Subject(
        "net",
        partial(build, shard_it=shard_it, make=make),
        machines,
        worlds,
        tuple(map(sizes_of, batches)),
    )
    made.prepare()
    return made


def setting(grouping=Grouping.AS_IS, shards=WORLD, reshard=Resharding.OPEN, **more):
    given = {
        "world_size": WORLD,
        "mesh": MeshShape(WORLD // shards, shards),
        "grouping": grouping,
        "reshard": reshard,
        "checkpointing": Checkpointing.AUTO,
        "sizes": sizes_of(1),
        "budget_bytes": 2**33,
    }
    return Setting(**{**given, **more})


def columns(param):
    return Shard(1) if param.dim() == 2 else None


def found_in(subject, batches=(1,)):
    pricer = Pricer(subject)
    space = space_of(subject, WORLD, Asked(2**33, tuple(map(sizes_of, batches))))
    present = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    return space, found_for(subject, pricer, space, present)
