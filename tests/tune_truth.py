"""What a setting of a tuned model comes to when the model really is sharded so: what is captured of
it, its groups, and those of the code that is written for it. Prices are compared with that."""

from dataclasses import replace
from functools import partial

import pytest
from tune_models import MACHINES, PER_NODE, WORLD

from graphshard.fsdp2.describe import name_of
from graphshard.fsdp2.undo import undo
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.world import faked, groups_of, pretended, world_of
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.plan_step import fsdp2
from graphshard.pricing.problem import PlanningPolicy, price
from graphshard.tune.layout import meshes_of, shard
from graphshard.tune.pricing import Pricer, policy_for


def sharded_so(subject, wanted, sizes):
    """As the setting wants it, without the finest groups."""
    made = subject.build(sizes)
    sharding, meshes = undo(made.model), meshes_of(wanted.mesh)
    if meshes.tensor is not None:
        subject.tensor.parallelize(made.model, meshes.tensor)
    calls = subject.groupings.calls[wanted.grouping]
    shard(made.model, sharding, calls, meshes.data, wanted.reshard, PER_NODE)
    return made


def captured(subject, wanted):
    """Costs of the model in these groups."""
    policy = PlanningPolicy(recompute=True, replaces_checkpoints=True, regroup=True)
    point = Point(WORLD, PER_NODE, MACHINES.machine, policy, wanted.sizes)
    build_it = partial(sharded_so, subject, wanted)
    study = Study("net", build_it, (point,), whole=True)
    study.prepare()
    return study.costs(point, freed=study.may_free(point))


def described(subject, wanted):
    """Infos and settings of these groups on this mesh, by name."""
    with pretended(WORLD):
        fake = faked(partial(sharded_so, subject, wanted, wanted.sizes))
        names = [name_of(group) for group in groups_of(fake)]
        world = world_of(fake, names, PER_NODE)
    rows = zip(world.infos, world.settings, strict=True)
    return dict(zip(names, rows, strict=True))


def compare(subject, wanted, real_costs):
    world = described(subject, wanted)
    costs, planning = Pricer(subject).inputs(wanted)
    for info, told in zip(costs.groups, planning.settings, strict=True):
        real_info, real = world[info.fqn]
        assert replace(info, id=0) == replace(real_info, id=0)
        assert lanes_aside(told) == lanes_aside(real)
    infos = tuple(replace(world[g.fqn][0], id=g.id) for g in real_costs.groups)
    settings = [world[g.fqn][1] for g in real_costs.groups]
    policy = policy_for(subject, wanted)
    real = price(replace(real_costs, groups=infos), settings, MACHINES.machine, policy)
    ours = price(costs, planning.settings, MACHINES.machine, policy)
    assert lower_bound_us(ours) == pytest.approx(lower_bound_us(real), rel=1e-9)
    found, theirs = fsdp2(ours), fsdp2(real)
    assert found.us == pytest.approx(theirs.us, rel=1e-9)
    # A group is named in the graph by a float32 scalar.
    assert found.peak_bytes == pytest.approx(theirs.peak_bytes, abs=64)
    # What one block hands to the next may be computed again in a group of both, only.
    freed = [sum(u.saved_bytes for u in own.units) for own in (costs, real_costs)]
    assert freed[0] <= freed[1]


def lanes_aside(own):
    """Lanes are named in the order in which they are found."""
    return replace(own, gather_lane="", reduce_lane="", post_forward_lane="")


def ran(code, subject, wanted):
    """The groups that the code makes of the bare model."""
    names = {}
    exec(compile(code, "tuned", "exec"), names)
    with pretended(WORLD):

        def build_it():
            made = subject.build(wanted.sizes)
            undo(made.model)
            names["shard"](made.model, device_type="cpu")
            return made

        fake = faked(build_it)
        found = [name_of(group) for group in groups_of(fake)]
        world = world_of(fake, found, PER_NODE)
    rows = zip(world.infos, world.settings, strict=True)
    return dict(zip(found, rows, strict=True)), names
