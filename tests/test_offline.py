"""Planning offline: what a few blocks say is what the whole model says."""

import functools
from collections import Counter

import pytest
import torch
from offline_models import (
    Block,
    Net,
    costs,
    llama,
    named,
    net,
    planned,
    point,
    shard,
    study,
    tokens,
    two_rows,
    without_nodes,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard.offline.repeats import CAPTURED, EARLY, LATE_UNCUT, repeats_in
from graphshard.offline.target import made_of
from graphshard.offline.world import built, pretended
from graphshard.schedule.plan import Direction


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
