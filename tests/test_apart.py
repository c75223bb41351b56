"""Reductions on lanes of their own: taken where they gain, and only if that is open."""

from dataclasses import replace

import pytest
from planning import layers
from promises import check

from graphshard.planner.fsdp2 import together
from graphshard.planner.links import LaneQueues
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import CollectiveLane
from graphshard.planner.separate_group import WORTH, plan_best, reductions_apart
from graphshard.schedule.reasons import Decision, Gain

OPEN = {"may_reduce_apart": True, "regroup_gathers": False, "most_ahead": 2}


def slow_launches(**more):
    """Collectives that are hardly more than a launch, and longer than compute."""
    problem = layers(8, compute_us=20.0, gather_us=60.0, reduce_us=60.0, shared_lane=True, **more)
    groups = tuple(replace(g, reshard=True) for g in problem.groups)
    lanes = (CollectiveLane("all ranks", 55.0),)
    return replace(problem, groups=groups, lanes=lanes, budget_bytes=10**6)


def step_us(planned):
    return planned.estimate.ours.step_time_us


def test_launches_are_hidden_behind_each_other():
    problem = slow_launches(**OPEN)
    one, best = plan_step(problem), plan_best(problem)
    assert best.reduces_apart
    assert step_us(best) <= (1 - WORTH) * step_us(one)
    assert best.estimate.fsdp2.step_time_us == one.estimate.fsdp2.step_time_us
    assert step_us(best) >= best.estimate.lower_bound_us
    gains = [reason for reason in best.reasons if isinstance(reason, Gain)]
    assert any(gain.decision is Decision.SEPARATE_GROUP for gain in gains)
    gains_us = sum(gain.gain_us for gain in gains)
    assert gains_us == best.estimate.fsdp2.step_time_us - step_us(best)


def test_only_if_it_is_open():
    problem = slow_launches(**{**OPEN, "may_reduce_apart": False})
    assert plan_best(problem) == plan_step(problem)


def test_bandwidth_is_no_reason():
    problem = layers(8, gather_us=300.0, reduce_us=300.0, shared_lane=True, **OPEN)
    problem = replace(problem, budget_bytes=10**6)
    best = plan_best(problem)
    assert not best.reduces_apart
    apart = plan_step(reductions_apart(problem))
    assert step_us(apart) > (1 - WORTH) * step_us(best)


@pytest.mark.parametrize("seed", range(5))
def test_a_problem_with_reductions_apart_is_planned_like_any_other(seed):
    problem = reductions_apart(slow_launches(temporary=100 * seed, **OPEN))
    assert [lane.link for lane in problem.lanes] == ["all ranks", "all ranks"]
    check(problem, 1.0 + seed / 5)


def test_there_and_back():
    problem = slow_launches(**OPEN)
    assert {g.reduce_lane for g in reductions_apart(problem).groups} == {1}
    assert together(reductions_apart(problem)).groups == problem.groups


def test_a_link_with_one_busy_lane_is_a_queue():
    alone, shared = (
        LaneQueues((CollectiveLane("x", 5.0),)),
        LaneQueues((CollectiveLane("x", 5.0, "x"), CollectiveLane("y", 5.0, "x"))),
    )
    for wires in (alone, shared):
        for job in range(4):
            wires.issue(job, 0, 20.0 + job, 3.0 * job)
    assert [alone.end_us(job) for job in range(4)] == [shared.end_us(job) for job in range(4)]
