"""Another world size, network or batch from a plan alone; formulas along the critical path."""

from dataclasses import replace

import pytest
from forecasts import planned
from planning import layers, random_problem
from plans import two_layers

from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import collective_us
from graphshard.cost.plan_formula import peak_bytes_formula, step_time_formula
from graphshard.cost.presets import preset
from graphshard.cost.whatif import Cluster, what_if
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Category, PricedOn
from graphshard.schedule.replay import critical_path, replayed

H100 = preset("h100")
HERE = Cluster(H100, 2, 8)
SIZE = 10**8


def priced(cluster, count=4):
    """A plan of equal layers whose collectives cost what the cost model says for `cluster`."""
    ranks = RankGroup(cluster.world_size, cluster.ranks_per_node)
    gather_us, reduce_us = (
        collective_us(cluster.machine, kind, ranks, SIZE)
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    )
    problem = layers(
        count, gather_us=gather_us, reduce_us=reduce_us, size=SIZE, regroup_gathers=False,
        activations=SIZE, resident=(Allocation(Category.SHARDED_PARAM, 10**9),),
    )  # fmt: skip
    plan = planned(problem)
    groups = tuple(replace(g, reduce_bytes=SIZE) for g in plan.groups)
    return replace(plan, groups=groups)


@pytest.mark.parametrize("seed", range(40))
def test_the_critical_path_and_the_replay_take_what_the_simulation_says(seed):
    plan = planned(random_problem(seed, micro=False))
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True):
        path = critical_path(schedule, forecast)
        assert path.work_us + sum(c.us for c in path.collectives) == forecast.us
        run = replayed(schedule, forecast, lambda _, us: us, lambda c: c.us)
        assert (run.us, run.exposed_us) == (forecast.us, forecast.exposed_us)


def test_a_plan_gives_its_formulas():
    plan = replace(priced(HERE), priced_on=PricedOn("h100", 8))
    step, peak = plan.formula("step_time"), plan.formula("peak_bytes")
    values = {"W": 2, "intra_bytes_per_us": H100.network.intra_bytes_per_us}
    wanted = {name: values[name] for name in step.free_symbols if name in values}
    missing = [name for name in step.free_symbols if name not in values]
    wanted |= dict.fromkeys(missing, H100.network.inter_bytes_per_us)
    assert step.evaluate(**wanted) == pytest.approx(plan.estimate.step_time_us)
    assert peak.evaluate(W=2) == pytest.approx(plan.estimate.peak_bytes)
    assert "W" in str(peak)
    with pytest.raises(ValueError, match="no formula of 'speed'"):
        plan.formula("speed")
    with pytest.raises(ValueError, match="does not say what it was priced for"):
        replace(plan, priced_on=None).formula("step_time")


def test_nothing_changes_where_nothing_changes():
    plan = priced(HERE)
    found = what_if(plan, HERE, HERE)
    assert found.step_time_us == pytest.approx(plan.estimate.step_time_us)
    assert found.exposed_us == pytest.approx(plan.estimate.exposed_us)
    assert found.peak_bytes == plan.estimate.peak_bytes


@pytest.mark.parametrize(
    "there", [Cluster(H100, 64, 8), Cluster(preset("h100-ethernet100"), 16, 8)]
)
def test_times_elsewhere_are_those_of_the_same_schedule_priced_there(there):
    plan = priced(HERE)
    found = what_if(plan, HERE, there)
    ranks = RankGroup(there.world_size, there.ranks_per_node)
    kinds = {"gather": CollectiveKind.ALL_GATHER, "reduce": CollectiveKind.REDUCE_SCATTER}
    us = {name: collective_us(there.machine, kind, ranks, SIZE) for name, kind in kinds.items()}
    expected = sum(
        replayed(
            schedule,
            forecast,
            lambda _, us: us,
            lambda c, steps=schedule.steps: us[str(steps[c.issue].kind)[:6]],
        ).us
        for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True)
    )
    assert found.step_time_us == pytest.approx(expected, rel=1e-3)


def test_the_formula_is_exact_here_and_never_above_the_schedule_elsewhere():
    plan = priced(HERE)
    found = step_time_formula(plan, HERE)
    network = H100.network
    links = {
        "intra_bytes_per_us": network.intra_bytes_per_us,
        "inter_bytes_per_us": network.inter_bytes_per_us,
    }
    values = {k: v for k, v in {"W": 2, **links}.items() if k in found.free_symbols}
    assert found.evaluate(**values) == pytest.approx(plan.estimate.step_time_us)
    for world in (4, 8, 64, 512):
        there = replace(HERE, world_size=world)
        at = found.evaluate(**{**values, "W": world})
        assert at <= what_if(plan, HERE, there).step_time_us * (1 + 1e-9)


def test_shards_shrink_with_the_ranks_and_activations_grow_with_the_batch():
    plan = priced(HERE)
    sizes = dict(plan.estimate.ours.peak_by_category)
    there = replace(HERE, world_size=4)
    sharded = sizes[Category.SHARDED_PARAM] + sizes.get(Category.SHARDED_GRAD, 0)
    assert what_if(plan, HERE, there).peak_bytes == plan.estimate.peak_bytes - sharded // 2
    assert peak_bytes_formula(plan, HERE).evaluate(W=4) == plan.estimate.peak_bytes - sharded // 2
    grown = what_if(plan, HERE, HERE, batch=2.0)
    assert grown.peak_bytes == plan.estimate.peak_bytes + sizes[Category.ACTIVATION]


def test_a_plan_that_cannot_be_moved_says_why():
    with pytest.raises(ValueError, match="no forecasts of its steps"):
        what_if(two_layers(), HERE, HERE)
    with pytest.raises(ValueError, match=r"sharded over \[2\] ranks, not all over 4"):
        what_if(priced(HERE), replace(HERE, world_size=4), HERE)
