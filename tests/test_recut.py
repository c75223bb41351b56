"""What a graph costs that computes again is counted from a few blocks of each kind."""

import functools

import pytest
from test_offline import llama, net

from graphshard.cost.presets import preset
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Point, Study
from graphshard.offline.target import made_of
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Reshard

DEPTH = 2 * CAPTURED + 2
NET = functools.partial(net, DEPTH, batch=64, seq=64)
FULL = functools.partial(llama, "full", DEPTH)


def planned(build, budget, *, fused, whole=False):
    """A plan, and what was said on the way."""
    policy = PlanningPolicy(
        budget, reshard=Reshard.OPEN, recompute=True, replaces_checkpoints=True, regroup=True
    )
    said = []
    point = Point(8, 8, preset("h100"), policy, fused=fused)
    study = Study("net", lambda sizes: made_of("net", build()), (point,), said.append, whole=whole)
    return next(study.answers()).plan, said


@pytest.mark.parametrize(
    ("build", "fused", "share"),
    [(NET, False, 0.8), (FULL, True, 1.3)],
    ids=["net", "llama, checkpoints replaced"],
)
def test_a_few_blocks_of_each_kind_stand_for_all(build, fused, share):
    """Some blocks compute more again than others: in a row, those that do the same are counted."""
    free, _ = planned(build, None, fused=fused)
    budget = int(share * free.estimate.fsdp2.peak_bytes)
    short, said = planned(build, budget, fused=fused)
    whole, _ = planned(build, budget, fused=fused, whole=True)
    assert len({one.group for one in short.recompute.activations}) > 1
    assert not any("whole model" in text for text in said)
    assert short.recompute.activations == whole.recompute.activations
    assert short.estimate == whole.estimate
    assert short.schedules == whole.schedules
