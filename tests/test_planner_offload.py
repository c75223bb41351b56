"""Activations that the host holds until backward, as the planner sees them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import layers, random_problem, with_offloads
from promises import check

from graphshard.errors import InfeasibleBudget
from graphshard.planner.activations import HostLink, Offload, OffloadOption, Recompute
from graphshard.planner.checked import checked
from graphshard.planner.choices import Choices
from graphshard.planner.observed import observed
from graphshard.planner.plan_step import fsdp2, plan_step
from graphshard.planner.problem import CollectiveLane
from graphshard.planner.score import means_something
from graphshard.planner.simulate import simulate
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Activation, Direction, Lane, StepKind

COUNT = 10
SAVED = 900


def problem_of(copy_us, extra_us, **settings):
    """Layers of 1,000 bytes of activations, of which most may be computed again or offloaded."""
    problem = layers(COUNT, compute_us=100.0, gather_us=5.0, reduce_us=5.0, activations=1000)
    names = [Activation(f"layers.{i}", 0) for i in range(COUNT)]
    last = COUNT - 1
    return replace(
        problem,
        lanes=(*problem.lanes, CollectiveLane("offload", 1.0), CollectiveLane("reload", 1.0)),
        host=HostLink(2, 3, 1.0),
        recompute=tuple(
            Recompute(name, i, last - i, SAVED, extra_us) for i, name in enumerate(names)
        ),
        offload_options=tuple(
            OffloadOption(name, Offload(i, i, last - i, SAVED, copy_us))
            for i, name in enumerate(names)
        ),
        **settings,
    )


def tight(problem, share=0.6):
    return replace(problem, budget_bytes=int(share * fsdp2(problem).peak_bytes))


def test_what_is_quickly_copied_is_offloaded():
    planned = plan_step(tight(problem_of(copy_us=60.0, extra_us=80.0)))
    assert planned.offload
    assert not planned.recompute
    # Copies run beside compute, but where memory leaves them no time.
    without = plan_step(tight(replace(problem_of(60.0, 80.0), offload_options=())))
    saved_us = without.estimate.step_time_us - planned.estimate.step_time_us
    assert saved_us >= 0.5 * 80.0 * len(without.recompute)


def test_what_is_slowly_copied_is_computed_again():
    planned = plan_step(tight(problem_of(copy_us=1000.0, extra_us=80.0)))
    assert planned.recompute
    assert len(planned.offload) <= 1


def test_both_together_beat_either():
    """The link is busy all the time; the rest is computed again."""
    problem = tight(problem_of(copy_us=250.0, extra_us=80.0), 0.56)
    planned = plan_step(problem)
    assert planned.offload
    assert planned.recompute
    only = plan_step(replace(problem, offload_options=()))
    assert planned.estimate.step_time_us < only.estimate.step_time_us


def test_with_room_nothing_leaves():
    problem = problem_of(copy_us=60.0, extra_us=80.0)
    planned = plan_step(replace(problem, budget_bytes=2 * fsdp2(problem).peak_bytes))
    assert planned.offload == planned.recompute == ()


def test_copies_take_what_they_were_seen_to_take():
    """The mean of both ways; one that was not seen is off by as much as the others are."""
    problem = problem_of(copy_us=60.0, extra_us=80.0)
    offloads = tuple(option.alone for option in problem.offload_options[:3])
    problem = replace(problem, recompute=(), offload_options=(), offloads=offloads)
    seen_us = {
        StepKind.OFFLOAD_ISSUE: (90.0, 30.0, None),
        StepKind.RELOAD_ISSUE: (110.0, 50.0, None),
    }
    segments = [
        tuple(
            Segment(
                step,
                us=7.0,
                comm_us=seen_us[step.kind][step.group] if step.kind in seen_us else None,
            )
            for step in schedule.steps
        )
        for schedule in plan_step(problem).schedules
    ]
    found = observed(problem, Measured(1, 1.0, 0.0, *segments))
    assert [offload.us for offload in found.offloads] == [100.0, 40.0, pytest.approx(70.0)]
    assert {region.us for region in (*found.forward, *found.backward)} == {7.0}


def test_the_host_has_a_limit():
    problem = tight(problem_of(copy_us=60.0, extra_us=80.0))
    assert len(plan_step(problem).offload) > 2
    host = replace(problem.host, limit_bytes=2 * SAVED)
    planned = plan_step(replace(problem, host=host))
    assert 1 <= len(planned.offload) <= 2
    assert planned.recompute


def test_an_activation_has_one_fate():
    problem = problem_of(60.0, 80.0)
    assert not means_something(problem, Choices(recompute=(3,), offload=(3,)))
    assert means_something(problem, Choices(recompute=(2,), offload=(3,)))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), fixed=st.booleans(), share=st.floats(0.5, 1.5))
def test_drawn_problems(seed, fixed, share):
    """The budget holds and the figures are those of the schedule, whatever else is chosen."""
    problem = checked(with_offloads(random_problem(seed), seed, fixed=fixed))
    check(problem, share)
    try:
        planned = plan_step(replace(problem, budget_bytes=int(share * fsdp2(problem).peak_bytes)))
    except InfeasibleBudget:
        return
    found = simulate(problem, planned.schedules, planned.recompute, planned.across, planned.offload)
    ours = planned.estimate.ours
    assert (found.step_us, found.peak_bytes) == (ours.step_time_us, ours.peak_bytes)
    copies = [
        [step.group for step in schedule.of_kind(kind)]
        for schedule, kinds in zip(
            planned.schedules,
            (
                (StepKind.OFFLOAD_ISSUE, StepKind.OFFLOAD_WAIT),
                (StepKind.RELOAD_ISSUE, StepKind.RELOAD_WAIT),
            ),
            strict=True,
        )
        for kind in kinds
    ]
    options = [problem.offload_options[i].alone for i in planned.offload]
    groups = {o.group for o in (*problem.offloads, *options)}
    assert all(sorted(one) == sorted(groups) for one in copies)
    limit = problem.host.limit_bytes
    assert limit is None or sum(o.bytes for o in options) <= limit


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_ends_before_its_memory_is_needed(direction):
    """Slow copies and no room to wait: the peak holds all the same."""
    problem = problem_of(copy_us=150.0, extra_us=1e5)
    planned = plan_step(replace(problem, budget_bytes=int(0.56 * fsdp2(problem).peak_bytes)))
    schedule = planned.schedules[list(Direction).index(direction)]
    assert any(step.lane in (Lane.OFFLOAD, Lane.RELOAD) for step in schedule.steps)
    assert planned.estimate.exposed_us > 0
