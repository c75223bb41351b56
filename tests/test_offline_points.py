"""Planning offline: one capture for several sizes, worlds and machines."""

import functools

import pytest
from offline_models import Block, Net, net, planned, point, shard, study, tokens
from torch import nn


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
