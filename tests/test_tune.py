"""Tuning: groupings without a capture of their own, the search, and the code."""

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

from graphshard.compiler.planning import problem_of
from graphshard.cost.optimizer import Optimizer
from graphshard.fsdp2.describe import name_of
from graphshard.fsdp2.undo import sharding_of, undo
from graphshard.offline.api import machine_of
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, groups_of, pretended, world_of
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.plan_step import fsdp2
from graphshard.pricing.problem import PlanningPolicy, price
from graphshard.schedule.estimate import OptimizerKind
from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    Obstacle,
    Resharding,
    Scheduling,
    Setting,
)
from graphshard.tune.code import code_of
from graphshard.tune.layout import meshes_of, shapes_for, shard
from graphshard.tune.modules import groupings_of, owner_of
from graphshard.tune.pricing import Pricer, policy_for
from graphshard.tune.search import (
    TOLERANCE,
    Accumulated,
    Asked,
    batches_for,
    found_for,
    present_of,
    space_of,
)
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


class ReadsElsewhere(Net):
    """The head is the embedding's weight, which its own group would have let go."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embedding.weight).logsumexp(-1).mean()


def reads_elsewhere():
    model = ReadsElsewhere(nn.ModuleList(Block(64) for _ in range(4)), 64)
    model.embedding = nn.Embedding(512, 64)
    del model.head
    return model


def test_a_module_whose_parameters_are_read_elsewhere_is_in_no_group_of_its_own():
    subject = subject_of(make=reads_elsewhere, batches=(1,))
    assert subject.kept is None
    assert {Grouping.BLOCKS, Grouping.PAIRS} & subject.groupings.calls.keys()
    assert Grouping.APART not in subject.groupings.calls
    assert Pricer(subject).price(setting(Grouping.PAIRS)).plan is not None


def test_what_a_call_shards_is_that_of_the_nearest_module():
    calls = (("a.b", "c"), ("a",), ("",))
    assert owner_of("a.b.weight", calls) == ("a.b", "c")
    assert owner_of("a.bc.weight", calls) == ("a",)
    assert owner_of("d", calls) == ("",)


def columns(param):
    return Shard(1) if param.dim() == 2 else None


WAYS = {
    "mixed": (partial(by_block, mp_policy=MIXED), partial(net, DEPTH)),
    "nested": (partial(by_block, nested=True), partial(net, 3)),
    "columns": (partial(by_block, shard_placement_fn=columns), partial(net, 3)),
    "unsharded": (None, partial(net, DEPTH)),
    "checkpointed": (by_block, partial(net, 3, Checkpointed)),
    "root only": (fully_shard, partial(net, 3)),
}


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


@pytest.mark.parametrize("way", WAYS)
def test_groupings_are_priced_as_if_they_had_been_captured(way):
    subject = subject_of(*WAYS[way], batches=(1,))
    for place, grouping in enumerate(subject.groupings.calls):
        real_costs = captured(subject, setting(grouping))
        # Meshes in turn: each grouping has one, each mesh a grouping.
        shards = (WORLD, 8, PER_NODE)[place % 3]
        rules = [Resharding.OPEN, Resharding.NEVER]
        rules += [Resharding.NODE] if shards > PER_NODE else [Resharding.ALWAYS]
        for reshard in rules:
            compare(subject, setting(grouping, shards, reshard), real_costs)


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


# -- search --------------------------------------------------------------------------------------


ASKED = Asked(2**33, tuple(map(sizes_of, (1, 2))))


@pytest.fixture(scope="module")
def tuned():
    """A model whose network decides, and what was found for it."""
    subject = subject_of()
    pricer = Pricer(subject)
    space = space_of(subject, WORLD, ASKED)
    present = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    return subject, pricer, space, found_for(subject, pricer, space, present)


def test_the_best_is_that_of_all(tuned):
    """The search's own pricer knows what it planned already."""
    _, pricer, space, found = tuned
    every = [pricer.price(one) for one in space.settings()]
    assert space.size == len(every) == found.num_settings
    assert found.num_planned < len(every) / 2
    best = max(pricer.rate(one) for one in every if one.plan is not None)
    assert pricer.rate(found.best) <= best
    assert best <= pricer.rate(found.best) * (1 + max(found.left, TOLERANCE))


def test_no_plan_beats_its_bound(tuned):
    _, pricer, _, found = tuned
    for one in [found.best, *found.front]:
        assert pricer.bound(one.setting).step_us <= one.step_us * (1 + 1e-9)
        assert pricer.bound(one.setting).least_bytes <= one.peak_bytes


def test_compute_alone_is_no_more_than_a_bound(tuned):
    """So a setting that waits for its bound comes no later than with it."""
    _, pricer, space, _ = tuned
    for one in space.settings():
        assert pricer.compute_us(one) <= pricer.bound(one).step_us * (1 + 1e-9)


@pytest.mark.parametrize("sync_each", [True, False])
@pytest.mark.parametrize("scheduling", Scheduling)
def test_micro_steps_share_a_problem_and_change_no_more_of_it(tuned, scheduling, sync_each):
    _, pricer, space, _ = tuned
    for one in list(space.settings())[::7]:
        several = replace(one, scheduling=scheduling, micro_steps=4, sync_each=sync_each)
        apart = problem_of(*pricer.inputs(several))
        found = pricer._problem(several)
        if sync_each:  # the options have no word for it
            groups = [g.keep_across is True for g in apart.groups]
            assert [g.keep_across for g in found.groups] == groups
            more = {"micro_steps": 4, "has_gradients": True, "groups": found.groups}
            apart = replace(apart, **more)
        assert found == apart


def test_the_front_falls_in_both(tuned):
    _, pricer, _, found = tuned
    assert found.front[0] == found.best
    for one, after in zip(found.front, found.front[1:], strict=False):
        assert pricer.rate(one) >= pricer.rate(after)
        assert one.peak_bytes > after.peak_bytes


def test_each_gain_takes_one_decision_back(tuned):
    _, pricer, _, found = tuned
    fields = {
        Decision.MESH: "mesh",
        Decision.GROUPING: "grouping",
        Decision.RESHARD: "reshard",
        Decision.CHECKPOINTING: "checkpointing",
        Decision.BATCH: "sizes",
    }
    assert found.gains
    for gain in found.gains:
        name = fields[gain.decision]
        changed = {name: getattr(gain.without.setting, name)}
        assert gain.without.setting == replace(found.best.setting, **changed) != found.best.setting
        assert gain.without == pricer.price(gain.without.setting)


def test_the_present_is_what_plan_says_of_it(tuned):
    subject, _, _, found = tuned
    point = Point(WORLD, PER_NODE, MACHINES.machine, PlanningPolicy(most_ahead=1), sizes_of(1))
    (answer,) = Study("net", subject.build, (point,)).answers()
    estimate = answer.plan.estimate
    theirs = estimate.fsdp2
    assert found.present.setting.scheduling is Scheduling.FSDP2
    assert found.present.step_us == pytest.approx(estimate.whole_fsdp2_us, rel=1e-6)
    assert found.present.peak_bytes == pytest.approx(theirs.peak_bytes, abs=64)


def test_another_machine_is_priced_from_the_same_captures(tuned):
    subject, *_ = tuned
    machine = machine_of("a100-ib200")
    anew = subject_of(machines=replace(MACHINES, machine=machine))
    for scheduling in Scheduling:
        reshard = Resharding.AS_IS if scheduling is Scheduling.FSDP2 else Resharding.OPEN
        kind = Checkpointing.AS_IS
        wanted = setting(reshard=reshard, scheduling=scheduling, checkpointing=kind)
        ours, theirs = (Pricer(one).price(wanted) for one in (subject.on(machine), anew))
        assert ours.step_us == theirs.step_us != Pricer(subject).price(wanted).step_us
        assert ours.peak_bytes == theirs.peak_bytes


def test_only_the_models_own_groups_are_priced_as_among_others(tuned):
    subject, *_ = tuned
    kept = Subject("net", subject.build, MACHINES, (WORLD,), subject.sizes)
    kept.prepare(regroups=False)
    assert kept.groupings is None
    wanted = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    ours, theirs = (Pricer(one).price(wanted) for one in (kept, subject))
    assert ours.step_us == pytest.approx(theirs.step_us, rel=1e-9)


def test_the_optimizer_is_in_the_step_and_in_the_options(tuned):
    subject, pricer, *_ = tuned
    fused = replace(subject, optimizer=Optimizer(OptimizerKind.ADAMW_FUSED, clips=True))
    wanted = setting()
    step = Pricer(fused).price(wanted)
    assert step.passes_us == pricer.price(wanted).passes_us
    assert step.step_us < pricer.price(wanted).step_us
    assert '"optimizer": "adamw_fused"' in code_of(fused, fused.bare(), wanted)
    assert "optimizer" not in code_of(subject, subject.bare(), wanted)


def test_where_nothing_fits_the_nearest_is_said(tuned):
    subject, pricer, *_ = tuned
    asked = replace(ASKED, budget_bytes=1000)
    found = found_for(subject, pricer, space_of(subject, WORLD, asked), None)
    assert (found.best, found.front, found.gains) == (None, (), ())
    assert found.nearest.least_bytes > 1000


def test_tokens_of_a_step_are_divided_into_micro_steps(tuned):
    subject = tuned[0]
    asked = replace(ASKED, batch_tokens=WORLD * 32 * 2)
    assert list(batches_for(subject, WORLD, asked)) == [
        Accumulated(sizes_of(1), 2),
        Accumulated(sizes_of(1), 2, sync_each=False),
        Accumulated(sizes_of(2), 1),
    ]
    assert not list(batches_for(subject, WORLD, replace(asked, batch_tokens=WORLD * 32 + 1)))


def test_what_only_the_last_micro_step_reduces_takes_memory_for_less_communication(tuned):
    pricer = tuned[1]
    each = setting(micro_steps=4)
    bounds = [pricer.bound(one).step_us for one in (each, replace(each, sync_each=False))]
    planned = [pricer.price(one) for one in (each, replace(each, sync_each=False))]
    assert bounds[0] > bounds[1]
    assert planned[0].step_us > planned[1].step_us
    assert planned[0].peak_bytes < planned[1].peak_bytes
    single = pricer.price(setting(micro_steps=1))
    assert planned[0].step_us == pytest.approx(4 * single.step_us, rel=0.02)


def test_meshes_are_of_whole_nodes():
    assert list(shapes_for(16, 4)) == [
        MeshShape(1, 16), MeshShape(4, 4), MeshShape(2, 8),
    ]  # fmt: skip
    assert list(shapes_for(4, 4)) == [MeshShape(1, 4)]
    assert list(shapes_for(6, 4)) == [MeshShape(1, 6)]


# -- models that keep something -------------------------------------------------------------------


def over_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def with_a_method(model):
    by_block(model)
    register_fsdp_forward_method(model, "extra_repr")


def several_roots(model):
    for block in model.blocks:
        fully_shard(block)


def found_in(subject, batches=(1,)):
    pricer = Pricer(subject)
    space = space_of(subject, WORLD, Asked(2**33, tuple(map(sizes_of, batches))))
    present = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    return space, found_for(subject, pricer, space, present)


def test_tensor_parallel_keeps_its_meshes_and_may_have_other_groups():
    subject = subject_of(over_tensor_parallel, batches=(1,))
    space, found = found_in(subject)
    assert (subject.kept, subject.moves) == (None, False)
    assert subject.data_ranks(WORLD) == 8
    assert space.shapes == (None,)
    assert Grouping.PAIRS in space.groupings
    assert found.best is not None


@pytest.mark.parametrize(
    ("shard_it", "why"), [(with_a_method, Obstacle.METHODS), (several_roots, Obstacle.ROOTS)]
)
def test_what_cannot_be_sharded_anew_keeps_its_calls(shard_it, why):
    subject = subject_of(shard_it, batches=(1,))
    space, found = found_in(subject)
    assert subject.kept is why
    assert (space.shapes, space.groupings) == ((None,), (Grouping.AS_IS,))
    assert found.best.setting.reshard is Resharding.OPEN
    code = code_of(subject, subject.bare(), found.best.setting)
    assert '"reshard": "auto"' in code
    assert "def shard" not in code


# -- code ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("way", ["mixed", "nested", "columns", "unsharded"])
def test_the_code_makes_the_groups_and_the_mesh(way):
    subject = subject_of(*WAYS[way], batches=(1,))
    model = subject.bare()
    rules = [Resharding.OPEN, Resharding.NODE, Resharding.NEVER, Resharding.ALWAYS]
    for place, grouping in enumerate(subject.groupings.calls):
        wanted = setting(grouping, (WORLD, 8)[place % 2], rules[place % 4])
        found, names = ran(code_of(subject, model, wanted), subject, wanted)
        assert found == described(subject, wanted)
        assert names["OPTIONS"]["memory_budget"] == 2**33
        assert (names["SIZES"], names["MICRO_STEPS"]) == (dict(wanted.sizes), 1)


def test_each_block_checkpointed_is_priced_with_all_blocks():
    subject = subject_of(make=partial(net, DEPTH), batches=(1,))
    space_of(subject, WORLD, Asked(2**33, (sizes_of(1),)))  # which looks at worlds with few blocks
    full, plain = (
        subject.costs(setting(checkpointing=kind))
        for kind in (Checkpointing.FULL, Checkpointing.AS_IS)
    )
    assert [info.fqn for info in full.groups] == [info.fqn for info in plain.groups]


def test_the_code_checkpoints_blocks():
    subject = subject_of(batches=(1,))
    wanted = setting(checkpointing=Checkpointing.FULL)
    code = code_of(subject, subject.bare(), wanted)
    with pretended(WORLD):
        made = subject.build(wanted.sizes)
        undo(made.model)
        names = {}
        exec(compile(code, "tuned", "exec"), names)
        names["shard"](made.model, device_type="cpu")
        kinds = {type(block).__name__ for block in made.model.blocks}
    assert kinds == {"FSDPCheckpointWrapper"}
    assert names["OPTIONS"]["recompute"] == "user"


def test_meshes_that_would_cut_unevenly_are_left_out():
    def over_half(model):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        by_block(model, mesh=mesh, shard_placement_fn=columns)

    subject = subject_of(over_half, partial(net, dim=24), batches=(1,))
    space = space_of(subject, WORLD, Asked(2**33, (sizes_of(1),)))
    assert space.shapes == (MeshShape(4, 4), MeshShape(2, 8))
