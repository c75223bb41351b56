"""Tuning: the search finds the best setting, says what is left, and prices as plans do."""

from dataclasses import replace

import pytest
from tune_models import (
    MACHINES,
    PER_NODE,
    WORLD,
    setting,
    sizes_of,
    subject_of,
)

from graphshard.compiler.planning import problem_of
from graphshard.cost.optimizer import Optimizer
from graphshard.offline.api import machine_of
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.estimate import OptimizerKind
from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    MeshShape,
    Resharding,
    Scheduling,
)
from graphshard.tune.code import code_of
from graphshard.tune.layout import shapes_for
from graphshard.tune.pricing import Pricer
from graphshard.tune.search import (
    TOLERANCE,
    Accumulated,
    Asked,
    batches_for,
    found_for,
    present_of,
    space_of,
)
from graphshard.tune.subject import Subject

ASKED = Asked(2**33, tuple(map(sizes_of, (1, 2))))


@pytest.fixture(scope="module")
def tuned():
    """A model whose network decides, and what was found for it."""
    subject = subject_of()
    pricer = Pricer(subject)
    space = space_of(subject, WORLD, ASKED)
    present = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    return subject, pricer, space, found_for(subject, pricer, space, present)


@pytest.mark.slow  # more than 100 settings are planned
@pytest.mark.timeout(900)
def test_the_best_is_that_of_all(tuned):
    """The search's own pricer knows what it planned already."""
    _, pricer, space, found = tuned
    every = [pricer.price(one) for one in space.settings()]
    assert space.size == len(every) == found.num_settings
    assert found.num_planned < len(every) / 2
    best = max(pricer.rate(one) for one in every if one.plan is not None)
    assert pricer.rate(found.best) <= best
    assert best <= pricer.rate(found.best) * (1 + max(found.left, TOLERANCE))


def test_no_plan_beats_its_bound(tuned):
    _, pricer, _, found = tuned
    for one in [found.best, *found.front]:
        assert pricer.bound(one.setting).step_us <= one.step_us * (1 + 1e-9)
        assert pricer.bound(one.setting).least_bytes <= one.peak_bytes


def test_compute_alone_is_no_more_than_a_bound(tuned):
    """So a setting that waits for its bound comes no later than with it."""
    _, pricer, space, _ = tuned
    for one in space.settings():
        assert pricer.compute_us(one) <= pricer.bound(one).step_us * (1 + 1e-9)


@pytest.mark.parametrize("sync_each", [True, False])
@pytest.mark.parametrize("scheduling", Scheduling)
def test_micro_steps_share_a_problem_and_change_no_more_of_it(tuned, scheduling, sync_each):
    _, pricer, space, _ = tuned
    for one in list(space.settings())[::7]:
        several = replace(one, scheduling=scheduling, micro_steps=4, sync_each=sync_each)
        apart = problem_of(*pricer.inputs(several))
        found = pricer._problem(several)
        if sync_each:  # the options have no word for it
            groups = [g.keep_across is True for g in apart.groups]
            assert [g.keep_across for g in found.groups] == groups
            more = {"micro_steps": 4, "has_gradients": True, "groups": found.groups}
            apart = replace(apart, **more)
        assert found == apart


def test_the_front_falls_in_both(tuned):
    _, pricer, _, found = tuned
    assert found.front[0] == found.best
    for one, after in zip(found.front, found.front[1:], strict=False):
        assert pricer.rate(one) >= pricer.rate(after)
        assert one.peak_bytes > after.peak_bytes


def test_each_gain_takes_one_decision_back(tuned):
    _, pricer, _, found = tuned
    fields = {
        Decision.MESH: "mesh",
        Decision.GROUPING: "grouping",
        Decision.RESHARD: "reshard",
        Decision.CHECKPOINTING: "checkpointing",
        Decision.BATCH: "sizes",
    }
    assert found.gains
    for gain in found.gains:
        name = fields[gain.decision]
        changed = {name: getattr(gain.without.setting, name)}
        assert gain.without.setting == replace(found.best.setting, **changed) != found.best.setting
        assert gain.without == pricer.price(gain.without.setting)


def test_the_present_is_what_plan_says_of_it(tuned):
    subject, _, _, found = tuned
    point = Point(WORLD, PER_NODE, MACHINES.machine, PlanningPolicy(most_ahead=1), sizes_of(1))
    (answer,) = Study("net", subject.build, (point,)).answers()
    estimate = answer.plan.estimate
    theirs = estimate.fsdp2
    assert found.present.setting.scheduling is Scheduling.FSDP2
    assert found.present.step_us == pytest.approx(estimate.whole_fsdp2_us, rel=1e-6)
    assert found.present.peak_bytes == pytest.approx(theirs.peak_bytes, abs=64)


def test_another_machine_is_priced_from_the_same_captures(tuned):
    subject, *_ = tuned
    machine = machine_of("a100-ib200")
    anew = subject_of(machines=replace(MACHINES, machine=machine))
    for scheduling in Scheduling:
        reshard = Resharding.AS_IS if scheduling is Scheduling.FSDP2 else Resharding.OPEN
        kind = Checkpointing.AS_IS
        wanted = setting(reshard=reshard, scheduling=scheduling, checkpointing=kind)
        ours, theirs = (Pricer(one).price(wanted) for one in (subject.on(machine), anew))
        assert ours.step_us == theirs.step_us != Pricer(subject).price(wanted).step_us
        assert ours.peak_bytes == theirs.peak_bytes


def test_only_the_models_own_groups_are_priced_as_among_others(tuned):
    subject, *_ = tuned
    kept = Subject("net", subject.build, MACHINES, (WORLD,), subject.sizes)
    kept.prepare(regroups=False)
    assert kept.groupings is None
    wanted = present_of(subject, WORLD, Accumulated(sizes_of(1)))
    ours, theirs = (Pricer(one).price(wanted) for one in (kept, subject))
    assert ours.step_us == pytest.approx(theirs.step_us, rel=1e-9)


def test_the_optimizer_is_in_the_step_and_in_the_options(tuned):
    subject, pricer, *_ = tuned
    fused = replace(subject, optimizer=Optimizer(OptimizerKind.ADAMW_FUSED, clips=True))
    wanted = setting()
    step = Pricer(fused).price(wanted)
    assert step.passes_us == pricer.price(wanted).passes_us
    assert step.step_us < pricer.price(wanted).step_us
    assert '"optimizer": "adamw_fused"' in code_of(fused, fused.bare(), wanted)
    assert "optimizer" not in code_of(subject, subject.bare(), wanted)


def test_where_nothing_fits_the_nearest_is_said(tuned):
    subject, pricer, *_ = tuned
    asked = replace(ASKED, budget_bytes=1000)
    found = found_for(subject, pricer, space_of(subject, WORLD, asked), None)
    assert (found.best, found.front, found.gains) == (None, (), ())
    assert found.nearest.least_bytes > 1000


def test_tokens_of_a_step_are_divided_into_micro_steps(tuned):
    subject = tuned[0]
    asked = replace(ASKED, batch_tokens=WORLD * 32 * 2)
    assert list(batches_for(subject, WORLD, asked)) == [
        Accumulated(sizes_of(1), 2),
        Accumulated(sizes_of(1), 2, sync_each=False),
        Accumulated(sizes_of(2), 1),
    ]
    assert not list(batches_for(subject, WORLD, replace(asked, batch_tokens=WORLD * 32 + 1)))


def test_what_only_the_last_micro_step_reduces_takes_memory_for_less_communication(tuned):
    pricer = tuned[1]
    each = setting(micro_steps=4)
    bounds = [pricer.bound(one).step_us for one in (each, replace(each, sync_each=False))]
    planned = [pricer.price(one) for one in (each, replace(each, sync_each=False))]
    assert bounds[0] > bounds[1]
    assert planned[0].step_us > planned[1].step_us
    assert planned[0].peak_bytes < planned[1].peak_bytes
    single = pricer.price(setting(micro_steps=1))
    assert planned[0].step_us == pytest.approx(4 * single.step_us, rel=0.02)


def test_meshes_are_of_whole_nodes():
    assert list(shapes_for(16, 4)) == [
        MeshShape(1, 16), MeshShape(4, 4), MeshShape(2, 8),
    ]  # fmt: skip
    assert list(shapes_for(4, 4)) == [MeshShape(1, 4)]
    assert list(shapes_for(6, 4)) == [MeshShape(1, 6)]
