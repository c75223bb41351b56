"""What a graph costs that computes again is counted from a few blocks of each kind."""

import functools

import pytest
from test_offline import llama, net

from graphshard.cost.presets import preset
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Point, Study
from graphshard.offline.target import made_of
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Reshard

DEPTH = 2 * CAPTURED + 2
NET = functools.partial(net, DEPTH, batch=64, seq=64)
FULL = functools.partial(llama, "full", DEPTH)


def answered(build, budget, *, fused, whole=False, offload=False):
    """An answer, and what was said on the way."""
    policy = PlanningPolicy(
        budget,
        reshard=Reshard.OPEN,
        recompute=True,
        replaces_checkpoints=True,
        regroup=True,
        offload=offload,
    )
    said = []
    point = Point(8, 8, preset("h100"), policy, fused=fused)
    study = Study("net", lambda sizes: made_of("net", build()), (point,), said.append, whole=whole)
    return next(study.answers()), said


def planned(build, budget, **how):
    """A plan, and what was said on the way."""
    answer, said = answered(build, budget, **how)
    return answer.plan, said


@pytest.mark.parametrize(
    ("build", "fused", "share", "offload"),
    [(NET, False, 0.8, False), (FULL, True, 1.3, False), (FULL, True, 1.3, True)],
    ids=["net", "llama, checkpoints replaced", "with a host"],
)
def test_a_few_blocks_of_each_kind_stand_for_all(build, fused, share, offload):
    """Some blocks compute more again than others: in a row, those that do the same are counted."""
    free, _ = planned(build, None, fused=fused)
    budget = int(share * free.estimate.fsdp2.peak_bytes)
    short, said = planned(build, budget, fused=fused, offload=offload)
    whole, _ = planned(build, budget, fused=fused, offload=offload, whole=True)
    assert offload or len({one.group for one in short.recompute.activations}) > 1
    assert bool(short.recompute.offloaded) is offload
    assert short.recompute.offloaded == whole.recompute.offloaded
    assert short.groups == whole.groups
    assert not any("whole model" in text for text in said)
    assert short.recompute.activations == whole.recompute.activations
    assert short.estimate == whole.estimate
    assert short.schedules == whole.schedules


@pytest.mark.parametrize(("build", "fused"), [(NET, False), (FULL, True)], ids=["net", "llama"])
def test_the_least_budget_that_an_error_names_fits(build, fused):
    """It is that of the graph that computes everything again, not of what was promised of it."""
    answer, _ = answered(build, LEAST_PLAUSIBLE_BYTES, fused=fused)
    least_bytes = answer.infeasible.shortage.least_bytes
    plan, _ = planned(build, least_bytes, fused=fused)
    assert plan.estimate.peak_bytes <= least_bytes
    less, _ = planned(build, least_bytes * 9 // 10, fused=fused)
    assert less is None
