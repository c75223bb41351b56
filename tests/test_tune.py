"""Tuning: groupings without a capture of their own, the search, and the code that sets a setting."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_offline import Block, Net, TwoRows, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from graphshard.fsdp2.describe import name_of
from graphshard.fsdp2.undo import Obstacle, sharding_of, undo
from graphshard.offline.api import machine_of
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Point, Study
from graphshard.offline.target import made_of
from graphshard.offline.world import Made, faked, groups_of, pretended, world_of
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.plan_step import fsdp2
from graphshard.pricing.problem import PlanningPolicy, price
from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    Resharding,
    Scheduling,
    Setting,
)
from graphshard.tune.code import code_of
from graphshard.tune.layout import shard
from graphshard.tune.modules import groupings_of, owner_of
from graphshard.tune.pricing import Pricer, policy_for
from graphshard.tune.search import (
    TOLERANCE,
    Asked,
    batches_for,
    found_for,
    present_of,
    space_of,
)
from graphshard.tune.subject import Machines, Subject, shapes_for

MIB = 2**20
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


# -- groupings -----------------------------------------------------------------------------------


def test_groupings_of_a_model_in_two_rows():
    with torch.device("meta"):
        found = groupings_of(TwoRows(4), sharding_of(TwoRows(4)), "")
    calls = found.calls
    assert set(calls) == {Grouping.BLOCKS, Grouping.PAIRS, Grouping.QUADS, Grouping.WHOLE}
    assert calls[Grouping.WHOLE] == (("",),)
    assert calls[Grouping.PAIRS][:2] == (("encoder.0", "encoder.1"), ("encoder.2", "encoder.3"))
    assert calls[Grouping.QUADS][1] == tuple(f"decoder.{n}" for n in range(4))
    assert len(calls[Grouping.BLOCKS]) == 9
    assert found.finest == calls[Grouping.BLOCKS]


def test_large_modules_outside_of_blocks_may_be_apart_and_tied_ones_not():
    with torch.device("meta"):
        model = net()
        apart = groupings_of(model, sharding_of(model), "").calls[Grouping.APART]
        assert set(apart) == {*((f"blocks.{n}",) for n in range(4)), ("embedding",), ("",)}
        model.head = nn.Linear(64, 512, bias=False)
        model.head.weight = model.embedding.weight
        assert Grouping.APART not in groupings_of(model, sharding_of(model), "").calls


def test_what_a_call_shards_is_that_of_the_nearest_module():
    calls = (("a.b", "c"), ("a",), ("",))
    assert owner_of("a.b.weight", calls) == ("a.b", "c")
    assert owner_of("a.bc.weight", calls) == ("a",)
    assert owner_of("d", calls) == ("",)


def columns(param):
    return Shard(1) if param.dim() == 2 else None


WAYS = {
    "plain": (by_block, net),
    "mixed": (partial(by_block, mp_policy=MIXED), partial(net, DEPTH)),
    "nested": (partial(by_block, nested=True), net),
    "columns": (partial(by_block, shard_placement_fn=columns), net),
    "unsharded": (None, partial(net, DEPTH)),
    "checkpointed": (by_block, partial(net, block=Checkpointed)),
    "root only": (fully_shard, net),
}


def really(subject, wanted):
    """What `wanted` is when the model is sharded so and captured: infos, settings, costs."""
    calls = subject.groupings.calls[wanted.grouping]

    def build_it(sizes):
        made = subject.build(sizes)
        sharding = undo(made.model)
        shard(made.model, sharding, calls, wanted.mesh, wanted.reshard, PER_NODE)
        return made

    policy = PlanningPolicy(recompute=True, replaces_checkpoints=True, regroup=True)
    point = Point(WORLD, PER_NODE, MACHINES.machine, policy, wanted.sizes)
    (found,) = Study("net", build_it, (point,), whole=True).costs()
    with pretended(WORLD):
        fake = faked(partial(build_it, wanted.sizes))
        names = [name_of(group) for group in groups_of(fake)]
        world = world_of(fake, names, PER_NODE)
    rows = zip(world.infos, world.settings, strict=True)
    return found, dict(zip(names, rows, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_groupings_are_priced_as_if_they_had_been_captured(way):
    shard_it, make = WAYS[way]
    subject = subject_of(shard_it, make)
    pricer = Pricer(subject)
    for place, grouping in enumerate(subject.groupings.calls):
        # Meshes and rules of resharding in turn: each grouping has some, each of them a grouping.
        shards = (WORLD, PER_NODE, 8)[place % 3]
        rules = [Resharding.OPEN, Resharding.ALWAYS, Resharding.NEVER]
        rules += [Resharding.NODE] if shards > PER_NODE else []
        for reshard in rules:
            wanted = setting(grouping, shards, reshard)
            (own, free), world = really(subject, wanted)
            costs, planning = pricer._inputs(wanted)
            for info, told in zip(costs.groups, planning.settings, strict=True):
                real_info, real = world[info.fqn]
                assert replace(info, id=0) == replace(real_info, id=0)
                assert lanes_aside(told) == lanes_aside(real)
            real_costs = free or own
            infos = tuple(replace(world[g.fqn][0], id=g.id) for g in real_costs.groups)
            settings = [world[g.fqn][1] for g in real_costs.groups]
            policy = policy_for(subject, wanted)
            problem = price(replace(real_costs, groups=infos), settings, MACHINES.machine, policy)
            ours = price(costs, planning.settings, MACHINES.machine, policy)
            assert lower_bound_us(ours) == pytest.approx(lower_bound_us(problem), rel=1e-9)
            theirs, found = fsdp2(problem), fsdp2(ours)
            assert found.us == pytest.approx(theirs.us, rel=1e-9)
            # A group is named in the graph by a float32 scalar.
            assert found.peak_bytes == pytest.approx(theirs.peak_bytes, abs=64)
            assert sum(u.saved_bytes for u in costs.units) == sum(
                u.saved_bytes for u in real_costs.units
            )


def lanes_aside(own):
    """Lanes are named in the order in which they are found."""
    return replace(own, gather_lane="", reduce_lane="", post_forward_lane="")
