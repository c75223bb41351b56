"""What a graph costs that computes again is counted from a few blocks of each kind."""

import random
from functools import partial

import pytest
from offline_answers import DEPTH, answered, studied
from offline_models import llama, net
from torch.distributed.device_mesh import init_device_mesh

from graphshard.compiler.planning import PlanningInputs
from graphshard.cost.presets import preset
from graphshard.offline import recut
from graphshard.offline.repeats import CAPTURED
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Activation, Recomputed

NET = partial(net, DEPTH, batch=64, seq=64)
BARE = partial(llama, "none", DEPTH)
NUMBERS = 3  # of activations of a block that are drawn
FULL = partial(llama, "full", DEPTH)


FITS = 0.8  # of the peak of FSDP2: blocks compute again
REPLACED = 1.3  # of the same, where the checkpoints that make it small are replaced


def replicated():
    """On a mesh that the user's function makes."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return NET(mesh=mesh)


@pytest.mark.parametrize(
    ("build", "fused", "share", "hosts"),
    [
        (NET, False, FITS, (False,)),
        (FULL, True, REPLACED, (False, True)),
        (replicated, False, FITS, (False,)),
    ],
    ids=["net", "llama, checkpoints replaced", "replicas"],
)
def test_a_few_blocks_of_each_kind_stand_for_all(build, fused, share, hosts):
    """Some blocks compute more again than others: in a row, those that do the same are counted.

    hosts: whether the host may hold activations, for each plan that is compared.
    """
    (free,), _ = answered(build, [(None, False)], fused=fused)
    budget = int(share * free.plan.estimate.fsdp2.peak_bytes)
    limits = [(budget, offload) for offload in hosts]
    from_a_few, said = answered(build, limits, fused=fused)
    from_all, _ = answered(build, limits, fused=fused, whole=True)
    assert not any("whole model" in text for text in said)
    for offload, few, every in zip(hosts, from_a_few, from_all, strict=True):
        short, whole = few.plan, every.plan
        assert offload or len({one.group for one in short.recompute.activations}) > 1
        assert bool(short.recompute.offloaded) is offload
        assert short.recompute.offloaded == whole.recompute.offloaded
        assert short.groups == whole.groups
        assert short.recompute.activations == whole.recompute.activations
        assert short.estimate == whole.estimate
        assert short.schedules == whole.schedules


@pytest.mark.parametrize(("build", "fused"), [(NET, False), (FULL, True)], ids=["net", "llama"])
def test_the_least_budget_that_an_error_names_fits(build, fused):
    """It is that of the graph that computes everything again, not of what was promised of it."""
    (answer,), _ = answered(build, [(LEAST_PLAUSIBLE_BYTES, False)], fused=fused)
    least_bytes = answer.infeasible.shortage.least_bytes
    limits = [(least_bytes, False), (least_bytes * 9 // 10, False)]
    (fits, less), _ = answered(build, limits, fused=fused)
    assert fits.plan.estimate.peak_bytes <= least_bytes
    assert less.plan is None


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
    study, _ = studied(make, fused=fused)
    world = study._worlds[8, 8]
    planning = PlanningInputs(world.settings, preset("h100"), policy, fused)
    (repeat,) = study._repeats
    chosen = drawn(random.Random(seed), repeat.names)
    short = study._short_of(study.points[0].sizes)
    found = recut.recut(short, 8, [repeat], world.infos, planning, chosen)
    whole = recut.costs_of(short, 8, (), {}, planning, chosen)
    assert found is not None
    assert found.by_direction == whole.by_direction
    assert [g.fqn for g in found.groups] == [g.fqn for g in whole.groups]
