"""Models to tune that have a plan for tensor parallel: in words, in styles, or as a function."""

from offline_models import Block
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tune_models import by_block, net, subject_of

DIM, DEPTH = 64, 4
IN_WORDS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
# Each rank has a part of the sequence between blocks.
BY_SEQUENCE = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


class OwnFunction(nn.Module):
    """A model with a function in the place of a plan, inside of another one."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def tp_plan(self, mesh):
        parallelize_module(self.model, mesh, {"blocks.*.up": ColwiseParallel(),
                                              "blocks.*.down": RowwiseParallel()})  # fmt: skip

    def forward(self, tokens):
        return self.model(tokens)


def planned(plan=None, depth=DEPTH, block=Block):
    model = net(depth, block, DIM)
    model.tp_plan = IN_WORDS if plan is None else plan
    return model


def with_function(depth=DEPTH):
    return nn.Sequential(OwnFunction(net(depth, dim=DIM)))


def subject_with(make=planned, shard_it=by_block, degrees=(2,), **more):
    subject = subject_of(shard_it, make, (1,), **more)
    subject.tensor.asked = degrees
    return subject
