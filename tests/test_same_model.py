"""A user's function that does not make the same model each time: an error, or the whole captured.

What is assumed of it (`graphshard.offline.same_model`, `graphshard.offline.recut`) is drawn to be
false, from the second or the third call on.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_answers import DEPTH, answered
from offline_models import Net, shard, tokens
from torch import nn

from graphshard.errors import OfflineError
from graphshard.offline.api import machine_of
from graphshard.offline.point import Point
from graphshard.offline.same_model import SameModel
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.offline.world import built, pretended
from graphshard.pricing.problem import PlanningPolicy

CASES = int(os.environ.get("GRAPHSHARD_EXAMPLES", "20"))


@dataclass(frozen=True)
class Spec:
    """What a model is made of. note: a number that nothing reads. factor: one that forward does."""

    depth: int = DEPTH
    hidden: int = 24
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    counts: bool = False
    batch: int = 16
    note: int = 0
    factor: int = 1


class Block(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.up = nn.Linear(8, spec.hidden, dtype=spec.dtype)
        self.down = nn.Linear(spec.hidden, 8, dtype=spec.dtype)
        self.note, self.factor = spec.note, spec.factor
        self.up.requires_grad_(not spec.frozen)

    def forward(self, x):
        for _ in range(self.factor):
            x = x + self.down(torch.relu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)
        return x


USUAL = Spec()


def model_of(spec=USUAL):
    model = Net(nn.ModuleList(Block(spec) for _ in range(spec.depth)))
    if spec.counts:
        model.register_buffer("calls", torch.zeros(3))
    shard(model)
    return model, (tokens(spec.batch, 32),)


def changing(other, calls):
    """A function that makes the usual model so many times, then another one."""
    left = [calls]

    def build():
        left[0] -= 1
        return model_of(USUAL if left[0] >= 0 else other)

    return build


SHAPES = {"depth": DEPTH - 1, "hidden": 32, "dtype": torch.bfloat16, "frozen": True, "counts": True}
CHANGES = {**SHAPES, "batch": 8, "note": 1, "factor": 2}
NUMBERS = ("note", "factor")


@settings(deadline=None, max_examples=CASES, derandomize=True)
@given(what=st.sampled_from(sorted(CHANGES)), calls=st.integers(0, 3))
def test_another_model_is_noticed(what, calls):
    build = changing(replace(USUAL, **{what: CHANGES[what]}), calls)
    same = SameModel(lambda sizes: built(lambda: made_of("net", build())))
    with pretended(8):
        for _ in range(calls):
            same(())
        assert not same.varies
        if calls == 0 or what in NUMBERS:
            same(())
            assert same.varies is (calls > 0)
        else:
            with pytest.raises(OfflineError, match="GS913: the function made another model"):
                same(())


def estimate_of(build, budget=None, *, whole=False):
    (answer,), said = answered(build, [(budget, False)], fused=False, whole=whole)
    return answer.plan.estimate, said


def test_figures_are_of_one_model_or_there_are_none():
    """The second call is for a few blocks of each kind, which compute some activations again."""
    estimate, _ = estimate_of(model_of)
    budget = int(0.8 * estimate.fsdp2.peak_bytes)
    with pytest.raises(OfflineError, match=r"GS913: .* module blocks\.13 was only there the first"):
        estimate_of(changing(replace(USUAL, depth=DEPTH - 1), 1), budget)
    other = replace(USUAL, factor=2)
    estimate, said = estimate_of(changing(other, 1), budget)
    assert any("others each time" in text for text in said)
    assert estimate == estimate_of(lambda: model_of(other), budget, whole=True)[0]


def test_other_parameters_at_other_sizes():
    """A table as long as the batch."""

    def build(sizes):
        batch = dict(sizes)["batch"]
        return made_of("net", model_of(Spec(hidden=8 * batch, batch=batch)))

    policy = PlanningPolicy(None)
    points = [Point(8, 8, machine_of("h100"), policy, (("batch", n),)) for n in (2, 4)]
    text = r"GS913: .* at other sizes: parameter blocks\.0\.up\.weight"
    with pytest.raises(OfflineError, match=text):
        list(Study("net", build, tuple(points)).answers())
