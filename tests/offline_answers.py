"""Studies that are captured once, and their answers to one budget after another."""

from functools import cache

from graphshard.cost.presets import preset
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Reshard

DEPTH = 2 * CAPTURED + 2


def point_of(fused, budget=None, offload=False):
    policy = PlanningPolicy(
        budget,
        reshard=Reshard.OPEN,
        recompute=True,
        replaces_checkpoints=True,
        regroup=True,
        offload=offload,
    )
    return Point(8, 8, preset("h100"), policy, fused=fused)


@cache
def studied(build, *, fused, whole=False):
    """Captured once for all budgets; and what it says."""
    said = []
    points = (point_of(fused),)
    study = Study("net", lambda sizes: made_of("net", build()), points, said.append, whole=whole)
    study.prepare()
    return study, said


def answered(build, limits, *, fused, whole=False):
    """An answer for each pair of a budget and whether the host may hold activations, and what was
    said on the way."""
    study, said = studied(build, fused=fused, whole=whole)
    before = len(said)
    return [study.answer(point_of(fused, *limit)) for limit in limits], said[before:]
