"""Planning offline: what repeats, symbolic sizes, several worlds, and that nothing is allocated."""

import functools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.errors import CaptureError, InfeasibleBudget, OfflineError
from graphshard.offline.api import machine_of
from graphshard.offline.counted import costs_key
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED, EARLY, LATE_UNCUT, repeats_in
from graphshard.offline.study import Study
from graphshard.offline.target import made_of, target_of
from graphshard.offline.world import built, pretended
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Direction, Plan

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


# -- a few blocks stand for all ------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(functools.partial(llama, "none"), id="no recompute"),
        pytest.param(functools.partial(llama, "selective"), id="selective recompute"),
        pytest.param(functools.partial(llama, "full"), id="full recompute"),
        pytest.param(functools.partial(net, depth=CAPTURED + 1), id="one more block"),
        pytest.param(functools.partial(net, nested=True), id="nested groups"),
        pytest.param(functools.partial(net, reshard_after_forward=False), id="kept"),
        pytest.param(functools.partial(net, reshard_after_forward=2), id="smaller mesh"),
        pytest.param(functools.partial(net, container=named), id="ModuleDict"),
        pytest.param(functools.partial(net, container=nn.Sequential), id="Sequential"),
        pytest.param(lambda: two_rows(), id="two rows"),
    ],
)
def test_what_a_few_blocks_say_is_what_the_whole_says(build):
    both = (costs(build, whole=whole) for whole in (True, False))
    for whole, short in zip(*both, strict=True):
        assert short.groups == whole.groups
        assert list(short.by_direction) == list(whole.by_direction)
        for direction in Direction:
            ours, theirs = short.by_direction[direction], whole.by_direction[direction]
            for name in ("num_ops", "uses", "params", "reductions", "kept"):
                assert getattr(ours.usage, name) == getattr(theirs.usage, name), (direction, name)
            assert ours.usage == theirs.usage
            assert ours.us == theirs.us
            assert ours.live == theirs.live
        assert without_nodes(short.units) == without_nodes(whole.units)
        assert Counter(short.lifetimes) == Counter(whole.lifetimes)


def test_the_plan_is_the_same_too():
    build = net
    assert planned(build) == planned(build, whole=True)


def test_recomputation_without_a_second_partition_is_nearly_the_same():
    """Of alike blocks there is no whole graph that could be cut again."""
    build = functools.partial(net, batch=64, seq=64)
    (free,) = planned(build)
    tight = (point(budget=free.estimate.fsdp2.peak_bytes * 2 // 3),)
    (short,), (whole,) = planned(build, tight), planned(build, tight, whole=True)
    assert short.recompute == whole.recompute
    assert short.recompute.activations
    for name, tolerance in (("peak_bytes", 0.005), ("step_time_us", 0.001)):
        ours, theirs = getattr(short.estimate, name), getattr(whole.estimate, name)
        assert ours == pytest.approx(theirs, rel=tolerance), name


def scaled(by, module, args, result):
    return result * by


def scale_results(model, by):
    """One hook on all blocks, with another number on the last one unless `by` is 1."""
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(functools.partial(scaled, by if number == 5 else 1.0))


def alike(change):
    """Whether blocks are still taken for alike after `change(model)`."""
    with pretended(8):

        def build():
            model = Net(nn.ModuleList(Block() for _ in range(CAPTURED + 1)))
            change(model)
            shard(model)
            return made_of("net", (model, tokens()))

        return bool(repeats_in(built(build).model))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.blocks[5], "mark", 5),
        lambda model: setattr(model.blocks[5].norm, "eps", 1e-3),
        lambda model: model.blocks[4].eval(),
        lambda model: model.blocks[0].up.requires_grad_(False),
        lambda model: model.blocks[3].register_buffer("scale", torch.zeros(2)),
        lambda model: model.blocks[2].register_forward_hook(lambda *call: None),
        lambda model: model.blocks[2].register_full_backward_hook(lambda *call: None),
        lambda model: scale_results(model, by=2.0),
        lambda model: setattr(model.blocks[1], "up", nn.Linear(8, 24, bias=False)),
        lambda model: setattr(model.blocks[1], "up", nn.Linear(8, 24, dtype=torch.bfloat16)),
        lambda model: setattr(model.blocks[1], "down", nn.Sequential(nn.Linear(24, 8))),
        lambda model: model.blocks.append(nn.Identity()),
    ],
)
def test_blocks_that_differ_are_not_alike(change):
    assert alike(lambda model: None)
    assert alike(lambda model: scale_results(model, by=1.0))
    assert not alike(change)


# By whether groups may travel in parts: then forward is cut inside of its last blocks.
CAPTURED_OF = {True: CAPTURED, False: EARLY + LATE_UNCUT}


@pytest.mark.parametrize("regroup", CAPTURED_OF)
def test_a_row_of_as_many_blocks_as_are_captured_is_captured_whole(regroup):
    count = CAPTURED_OF[regroup]
    found = study(functools.partial(net, depth=count), (point(regroup=regroup),))
    list(found.answers())
    assert found.effort.num_repeated == 0
    assert found.effort.num_groups == count + 1


@pytest.mark.parametrize("regroup", CAPTURED_OF)
def test_facts_say_how_many_blocks_were_not_captured(regroup):
    found = study(functools.partial(net, depth=9), (point(regroup=regroup),))
    list(found.answers())
    assert found.effort.num_repeated == 9 - CAPTURED_OF[regroup]
    assert found.effort.num_groups == 10
    with torch.device("meta"):
        whole = Net(nn.ModuleList(Block() for _ in range(9)))
    assert found.effort.num_params == sum(p.numel() for p in whole.parameters())


class ByNumber(Net):
    """Insists on its number of blocks."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number in range(CAPTURED + 1):
            x = self.blocks[number](x)
        return self.head(x).sum()


class Taps(Net):
    """Another group joins behind the first block that is not captured if a few stand for all."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.tap = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == CAPTURED:
                x = self.tap(x)
        return self.head(x).sum()


class Shared(Net):
    """All blocks share a layer, which is a group of its own."""

    def __init__(self, blocks):
        super().__init__(blocks)
        for block in blocks[1:]:
            block.up = blocks[0].up
        self.tap = blocks[0].up


class Averaged(Net):
    """What is done behind the blocks grows with their number."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return self.head(torch.stack(found).mean(0)).sum()


class Losses(Net):
    """A loss of each block."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        losses = []
        for block in self.blocks:
            x = block(x)
            losses.append(x.square().mean())
        return self.head(x).sum() + sum(losses)


@pytest.mark.parametrize("kind", [ByNumber, Taps, Shared, Averaged, Losses])
def test_blocks_that_cannot_stand_for_others_are_captured_whole(kind):
    def build():
        model = kind(nn.ModuleList(Block() for _ in range(CAPTURED + 1)))
        if hasattr(model, "tap"):
            fully_shard(model.tap)
        shard(model)
        return model, tokens()

    (short,), (whole,) = planned(build), planned(build, whole=True)
    assert short == whole


class SideResult(nn.Module):
    """A block whose second result only the next one reads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x, side):
        x = x + self.down(torch.relu(self.up(x + side)))
        return x, x * 2


class SideResults(nn.Module):
    """Nobody reads the second result of the last block, so that it has no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SideResult() for _ in range(3))

    def forward(self, x):
        side = x
        for block in self.blocks:
            x, side = block(x, side)
        return x.sum(), side.detach()


def test_a_block_with_a_result_that_has_no_gradient_is_planned():
    def build():
        model = SideResults()
        shard(model)
        return model, torch.zeros(2, 8)

    (plan,) = planned(build)
    assert len(plan.groups) == 3


def test_a_buffer_of_one_number_is_planned():
    """It has as many dimensions as what stands for a group in a graph, and no value here."""

    class Floored(Net):
        def __init__(self):
            super().__init__(nn.ModuleList([Block()]))
            self.register_buffer("floor", torch.zeros(()))

        def forward(self, tokens):
            return torch.maximum(super().forward(tokens), self.floor)

    def build():
        model = Floored()
        shard(model)
        return model, (tokens(),)

    (plan,) = planned(build)
    assert len(plan.groups) == 2


# -- one capture for many points -----------------------------------------------------------------


class Insists(Net):
    """Dynamo makes a constant of the length."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(tokens.shape[1]):
            x = x + 1
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def insisting(batch, seq):
    model = Insists(nn.ModuleList(Block() for _ in range(2)))
    shard(model)
    return model, tokens(batch, seq)


def sized(batch, seq):
    return (("batch", batch), ("seq", seq))


SIZES = (sized(2, 4), sized(4, 4), sized(2, 8), sized(1, 8))


@pytest.mark.parametrize(
    ("build", "captures"),
    [
        pytest.param(functools.partial(net, depth=2), [None], id="whole"),
        pytest.param(net, [None], id="alike blocks"),
        pytest.param(insisting, list(SIZES), id="insists on numbers"),
    ],
)
def test_plans_at_many_sizes_are_those_of_captures_at_these_sizes(build, captures):
    points = tuple(point(sizes=sizes) for sizes in SIZES)
    found = study(build, points)
    together = [answer.plan for answer in found.answers()]
    assert [sizes for _, sizes in found._cuts.captures] == captures
    for one, plan in zip(points, together, strict=True):
        (alone,) = planned(build, (one,))
        # With symbols, forward computes sizes too: no time, but other numbers of ops.
        for name in ("groups", "estimate", "reasons", "backward", "collective_signature"):
            assert getattr(plan, name) == getattr(alone, name), (one.sizes, name)
        for ours, theirs in zip(plan.forecasts, alone.forecasts, strict=True):
            assert (ours.us, ours.exposed_us) == (theirs.us, theirs.exposed_us)
            assert ours.collectives == theirs.collectives


def test_plans_of_many_worlds_and_machines_are_those_of_each():
    worlds, machines = (2, 8, 24), ("h100-ib400", "a100-ethernet100")
    by_world = {w: tuple(point(w, hardware=name) for name in machines) for w in worlds}
    points = sum(by_world.values(), ())
    together = dict(zip(points, planned(net, points), strict=True))
    assert len({plan.estimate.step_time_us for plan in together.values()}) == len(points)
    for world, own in by_world.items():
        found = planned(net, own)
        assert found == [together[one] for one in own]
        assert {g.world_size for plan in found for g in plan.groups} == {world}
    # Another machine beside it changes nothing either.
    assert planned(net, points[-1:]) == [together[points[-1]]]


def test_a_point_that_nothing_fits_leaves_the_others():
    points = (point(budget=1000), point(budget=2**30))
    low, high = study(net, points).answers()
    assert low.plan is None
    assert low.infeasible.code == "GS601"
    assert high.infeasible is None
    assert high.plan.estimate.peak_bytes <= 2**30


# -- graphshard.plan -----------------------------------------------------------------------------


def unsharded(depth=2):
    with torch.device("meta"):
        return Net(nn.ModuleList(Block() for _ in range(depth)))


def plan_of(model, inputs, **settings):
    settings = {"world_size": 8, "hardware": HARDWARE, **settings}
    return graphshard.plan(model, inputs, **settings)


def test_a_model_with_shard_and_a_function_have_the_same_plan():
    def sharded():
        model = Net(nn.ModuleList(Block() for _ in range(2)))
        shard(model)
        return model

    found = plan_of(unsharded(), tokens(), shard=shard)
    assert found == plan_of(sharded, (tokens(),))
    assert found == plan_of(sharded, {"tokens": tokens()})
    assert found == plan_of(functools.partial(unsharded, 2), [tokens()], shard=shard)
    assert Plan.from_json(found.to_json()) == found
    assert found.name == "plan"
    assert [g.fqn for g in found.groups] == ["(root)", "blocks.0", "blocks.1"]
    assert found.priced_on.machine == HARDWARE


def test_the_model_stays_as_it_is():
    model = unsharded()
    before = {name: (id(p), type(p), p.device) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    plan_of(model, tokens(), shard=shard)
    assert {n: (id(p), type(p), p.device) for n, p in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == kinds
    assert not torch.distributed.is_initialized()


def test_a_budget_is_kept_and_one_that_nothing_fits_is_an_error():
    free = plan_of(unsharded(), tokens(), shard=shard)
    budget = free.estimate.fsdp2.peak_bytes + 4096
    bound = plan_of(unsharded(), tokens(), shard=shard, memory_budget=budget)
    assert bound.estimate.peak_bytes <= budget == bound.estimate.budget_bytes
    with pytest.raises(InfeasibleBudget, match="GS601: no schedule fits"):
        plan_of(unsharded(), tokens(), shard=shard, memory_budget="1KiB")


def test_inside_a_process_group():
    with pretended(2), pytest.raises(OfflineError, match="GS901: this process is part of"):
        plan_of(unsharded(), tokens(), shard=shard)


def test_a_model_with_data():
    with pytest.raises(OfflineError, match=r"GS902: parameter embedding\.weight holds data"):
        plan_of(Net(nn.ModuleList()), tokens(), shard=shard)


def test_a_model_that_is_sharded_already():
    with pretended(2):
        model = unsharded()
        shard(model)
    with pytest.raises(OfflineError, match="GS909: the model is sharded already"):
        plan_of(model, tokens())


def test_a_model_that_nobody_shards():
    with pytest.raises(OfflineError, match="GS903: no module of Net is sharded"):
        plan_of(unsharded(), tokens())


def test_a_loss_without_parameters():
    with pytest.raises(CaptureError, match="GS910: "):
        plan_of(unsharded().requires_grad_(False), tokens(), shard=shard)
