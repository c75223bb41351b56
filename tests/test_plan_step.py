"""The planner on problems by hand and at random: budgets hold, FSDP2 is never the faster one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import in_place, layers, random_problem

from graphshard.errors import InfeasibleBudget
from graphshard.planner.activations import Recompute
from graphshard.planner.plan_step import fsdp2, plan_step
from graphshard.schedule.plan import Activation, Direction, StepKind
from graphshard.schedule.reasons import Decision, Gain


def test_without_a_budget_the_peak_is_at_most_that_of_fsdp2():
    planned = plan_step(layers(6, gather_us=150.0, root=True))
    estimate = planned.estimate
    assert estimate.peak_bytes <= estimate.budget_bytes == estimate.fsdp2.peak_bytes
    assert estimate.step_time_us <= estimate.fsdp2.step_time_us


def test_a_larger_budget_keeps_groups_until_backward():
    problem = layers(6, gather_us=400.0)
    free = plan_step(replace(problem, budget_bytes=10**9))
    forward, backward = free.schedules
    kept = [s.group for s in forward.of_kind(StepKind.RELEASE) if s.kept]
    assert kept
    assert [s.group for s in backward.of_kind(StepKind.GATHER_ISSUE) if s.kept] == kept[::-1]
    assert free.estimate.step_time_us <= plan_step(problem).estimate.step_time_us


@pytest.mark.parametrize("count", [8, 12])
@pytest.mark.parametrize("options", [1, 2, 4])
def test_room_that_computing_again_makes_is_used(count, options):
    """To keep everything, so many options are needed; one by one they gain nothing."""
    problem = layers(
        count, gather_us=300.0, reduce_us=300.0, activations=1000, shared_lane=True,
        micro_steps=4, sync_each=False, regroup_gathers=True,
    )  # fmt: skip
    free = plan_step(replace(problem, budget_bytes=10**9)).estimate
    offered = tuple(
        Recompute(Activation(f"layers.{i}", 0), i, count - 1 - i, saved_bytes=900, extra_us=60.0)
        for i in range(count - 1)
    )
    budget = free.ours.peak_bytes - 900 * options + 100
    tight = plan_step(replace(problem, recompute=offered, budget_bytes=budget))
    assert len(tight.recompute) == options
    longer_us = tight.estimate.step_time_us - free.step_time_us
    assert longer_us <= 1.1 * options * 4 * 60.0


@pytest.mark.parametrize(("count", "gather_us"), [(24, 400.0), (32, 300.0)])
def test_more_memory_is_no_slower(count, gather_us):
    """What computing again makes room for is kept as far as it fits, be it not all."""
    problem = layers(
        count, gather_us=gather_us, reduce_us=300.0, activations=1000, shared_lane=True,
        regroup_gathers=True,
    )  # fmt: skip
    offered = tuple(
        Recompute(Activation(f"layers.{i}", 0), i, count - 1 - i, saved_bytes=900, extra_us=50.0)
        for i in range(count - 1)
    )
    most = plan_step(replace(problem, budget_bytes=10**9)).estimate.ours.peak_bytes
    best_us, planned = float("inf"), 0
    for percent in range(40, 101, 8):
        tight = replace(problem, recompute=offered, budget_bytes=most * percent // 100)
        step_us = plan_step(tight).estimate.step_time_us
        assert step_us <= 1.01 * best_us
        best_us, planned = min(best_us, step_us), planned + 1
    assert planned == 8


def test_what_cannot_fit_is_an_error_that_says_what_would():
    problem = layers(3, size=1000)
    with pytest.raises(
        InfeasibleBudget, match=r"GS601: .* budget of 10 B; the least feasible peak is [\d.]+"
    ):
        plan_step(replace(problem, budget_bytes=10))


@pytest.mark.parametrize("reshard", [True, False])
def test_what_the_user_set_is_binding(reshard):
    problem = layers(4, gather_us=150.0, budget_bytes=10**9)
    groups = tuple(replace(g, reshard=reshard) for g in problem.groups)
    forward, _ = plan_step(replace(problem, groups=groups)).schedules
    kept = {s.kept for s in forward.of_kind(StepKind.RELEASE)}
    assert kept == {not reshard}


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0.7, 2.0),
    copies=st.booleans(),
    early=st.booleans(),
    issue_us=st.sampled_from([0.0, 0.0, 4.0, 40.0]),
    wait_us=st.sampled_from([0.0, 3.0]),
)
def test_the_budget_holds_and_fsdp2_is_not_faster(seed, share, copies, early, issue_us, wait_us):
    problem = replace(random_problem(seed, regroup=False), early_waits=early)
    problem = problem if copies else in_place(problem)
    problem = issued_in(problem, issue_us, wait_us)
    own = fsdp2(problem)
    budget = int(own.peak_bytes * share)
    try:
        estimate = plan_step(replace(problem, budget_bytes=budget)).estimate
    except InfeasibleBudget:
        assert own.peak_bytes > budget
        return
    assert estimate.peak_bytes <= budget
    if own.peak_bytes <= budget:
        assert estimate.step_time_us <= own.us


def issued_in(problem, issue_us, wait_us):
    """By the thread that computes."""
    lanes = (replace(lane, issue_us=issue_us, wait_us=wait_us) for lane in problem.lanes)
    return replace(problem, lanes=tuple(lanes))


def test_issues_and_waits_take_compute():
    """Of each collective, whatever travels in it, in FSDP2's order too."""

    def busy_us(figures):
        return figures.step_time_us - figures.exposed_us

    problem = layers(6, gather_us=5.0, reduce_us=5.0)
    free, taken = plan_step(problem), plan_step(issued_in(problem, 4.0, 3.0))
    for before, after, schedules in (
        (free.estimate.ours, taken.estimate.ours, taken.schedules),
        (free.estimate.fsdp2, taken.estimate.fsdp2, taken.fsdp2.schedules),
    ):
        count = sum(s.num_all_gathers + s.num_reduce_scatters for s in schedules)
        assert busy_us(after) - busy_us(before) == pytest.approx(7.0 * count)


def with_copy_times(problem):
    def part(one):
        slow = replace(one.gather, pack_us=7.0, unpack_us=30.0)
        reduce = replace(one.gradient.reduce, pack_us=20.0)
        return replace(one, gather=slow, gradient=replace(one.gradient, reduce=reduce))

    groups = (replace(g, parts=tuple(map(part, g.parts))) for g in problem.groups)
    return replace(problem, groups=tuple(groups))


def test_collectives_in_place_save_copies_and_buckets():
    problem = with_copy_times(layers(6, gather_us=10.0))
    before, after = plan_step(problem), plan_step(in_place(problem))
    assert after.estimate.fsdp2 == before.estimate.fsdp2  # which makes the copies
    assert after.estimate.budget_bytes == before.estimate.budget_bytes
    saved_us = before.estimate.step_time_us - after.estimate.step_time_us
    assert saved_us >= 6 * (37.0 + 20.0)  # and what is gathered again in backward
    gains = [r for r in after.reasons if isinstance(r, Gain)]
    (gain,) = [r for r in gains if r.decision is Decision.IN_PLACE]
    assert gain.gain_us > 0
    assert gain.gain_bytes >= 0
    estimate = after.estimate
    assert sum(r.gain_us for r in gains) == estimate.fsdp2.step_time_us - estimate.step_time_us


def test_every_step_of_the_problem_is_in_the_schedules():
    problem = layers(5, root=True, budget_bytes=10**9)
    forward, backward = plan_step(problem).schedules
    assert (forward.direction, backward.direction) == tuple(Direction)
    for schedule in (forward, backward):
        for kind in (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT, StepKind.RELEASE):
            assert sorted(s.group for s in schedule.of_kind(kind)) == list(range(5))
    assert sorted(s.group for s in backward.of_kind(StepKind.REDUCE_WAIT)) == list(range(5))


def test_equal_problems_get_equal_plans():
    assert plan_step(layers(8, root=True)) == plan_step(layers(8, root=True))


@pytest.mark.parametrize("seed", range(6))
def test_plan_and_fsdp2_carry_the_memory_of_each_step(seed):
    """By category, during each step: the largest sum is the peak, its owners say whose it is."""
    problem = replace(random_problem(seed), micro_steps=1, sync_each=True)
    planned = plan_step(problem)
    for forecasts, figures in (
        (planned.forecasts, planned.estimate.ours),
        (planned.fsdp2.forecasts, planned.estimate.fsdp2),
    ):
        assert max(max(f.alive_bytes) for f in forecasts) == figures.peak_bytes
        assert sum(owner.bytes for owner in figures.peak_owners) == figures.peak_bytes
        at = figures.peak_at
        forecast = forecasts[problem.directions.index(at.direction)]
        assert forecast.alive_bytes[at.step] == figures.peak_bytes
        inside = {category: sizes[at.step] for category, sizes in forecast.memory}
        assert {k: v for k, v in inside.items() if v} == dict(figures.peak_by_category)
        assert sum(f.us for f in forecasts) == figures.step_time_us


def waits_after(planned):
    """For each reduction, the region before which it is waited for."""
    regions, found = 0, {}
    for step in planned.schedules[1].steps:
        if step.kind is StepKind.COMPUTE:
            regions = step.stop
        elif step.kind is StepKind.REDUCE_WAIT:
            found[step.group] = regions
    return found


def test_gradients_that_are_used_at_once_are_waited_for_when_they_are_done():
    """An optimizer in backward: no wait comes later for it, some come earlier, at the same time."""
    problem = layers(8, gather_us=120.0, activations=5000, budget_bytes=10**9)
    late, early = plan_step(problem), plan_step(replace(problem, early_waits=True))
    before, after = waits_after(late), waits_after(early)
    assert all(after[group] <= before[group] for group in before)
    assert any(after[group] < before[group] for group in before)
    assert early.estimate.step_time_us <= late.estimate.step_time_us * 1.001
    assert early.estimate.peak_bytes <= late.estimate.peak_bytes
