"""What a graph costs that computes again is counted from a few blocks of each kind."""

import random
from functools import partial

import pytest
from test_offline import llama, net

from graphshard.compiler.planning import PlanningInputs
from graphshard.cost.presets import preset
from graphshard.offline import recut
from graphshard.offline.point import Point
from graphshard.offline.repeats import CAPTURED
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Activation, Recomputed, Reshard

DEPTH = 2 * CAPTURED + 2
NET = partial(net, DEPTH, batch=64, seq=64)
BARE = partial(llama, "none", DEPTH)
NUMBERS = 3  # of activations of a block that are drawn
FULL = partial(llama, "full", DEPTH)


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


def drawn(source, names):
    """What each block computes again: runs of blocks do the same, a long one last."""
    runs, left = [names[-CAPTURED - 1 :]], names[: -CAPTURED - 1]
    while left:
        length = source.choice((1, 2, 5))
        runs, left = [*runs, left[:length]], left[length:]
    chosen = [(run, [n for n in range(NUMBERS) if source.random() < 0.5]) for run in runs]
    return Recomputed(
        tuple(Activation(b, n) for run, numbers in chosen for b in run for n in numbers)
    )


@pytest.mark.parametrize(
    ("make", "fused", "seed"), [(NET, False, 0), (NET, False, 1), (BARE, True, 0)]
)
def test_runs_of_any_length_cost_what_they_cost_in_the_whole(make, fused, seed):
    """Of runs in the middle fewer blocks are captured than of those at the end."""
    policy = PlanningPolicy(None, recompute=True, regroup=True)
    point = Point(8, 8, preset("h100"), policy, fused=fused)
    study = Study("net", lambda sizes: made_of("net", make()), (point,))
    study._prepare()
    world = study._worlds[8, 8]
    planning = PlanningInputs(world.settings, point.machine, policy, fused)
    (repeat,) = study._repeats
    chosen = drawn(random.Random(seed), repeat.names)
    build = lambda: made_of("net", make())  # noqa: E731 (a fresh one for each capture)
    found = recut.recut(build, "net", [repeat], world.infos, planning, chosen)
    whole = recut._short_costs(build, "net", {}, planning, chosen)
    assert found is not None
    assert found.by_direction == whole.by_direction
    assert [g.fqn for g in found.groups] == [g.fqn for g in whole.groups]
