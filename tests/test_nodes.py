"""Shards that the ranks of a node hold from forward to backward, as the planner decides on them."""

from dataclasses import replace
from statistics import mean

import pytest
from exhaustive import optimum
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import layers, random_problem, with_nodes
from promises import check
from solve_small import small_problem

from graphshard.errors import InfeasibleBudget, PlanError
from graphshard.planner.checked import checked
from graphshard.planner.plan_step import NODES_WORTH, fsdp2, plan_step
from graphshard.planner.problem import PostForwardMesh
from graphshard.planner.simulate import simulate
from graphshard.schedule import signature
from graphshard.schedule.plan import GroupInfo, Plan, StepKind
from graphshard.schedule.reasons import Decision, Gain, Hold
from graphshard.view.moves import moves
from graphshard.view.text import step_text

SLOW = layers(8, gather_us=600.0, reduce_us=20.0)


def within(problem, share=1.0):
    """`problem` with a budget: this share of FSDP2's own peak."""
    return replace(problem, budget_bytes=int(fsdp2(problem).peak_bytes * share))


def held(planned):
    return [s.group for s in planned.schedules[0].of_kind(StepKind.RELEASE) if s.on_node]


def test_nodes_hold_what_there_is_no_room_to_keep():
    plain = plan_step(within(SLOW)).estimate.ours
    planned = plan_step(with_nodes(within(SLOW)))
    ours = planned.estimate.ours
    assert ours.peak_bytes <= plain.peak_bytes
    assert ours.step_time_us < 0.95 * plain.step_time_us
    gathers = [s for s in planned.schedules[1].of_kind(StepKind.GATHER_ISSUE) if s.on_node]
    assert sorted(s.group for s in gathers) == sorted(held(planned)) != []
    gain = next(
        r for r in planned.reasons if isinstance(r, Gain) and r.decision is Decision.ON_NODE
    )
    assert gain.gain_us > 0
    holds = [r.group for r in planned.reasons if isinstance(r, Hold) and r.on_node]
    assert holds == held(planned)


def test_with_room_everything_is_kept():
    planned = plan_step(with_nodes(replace(SLOW, budget_bytes=10**9)))
    assert held(planned) == []


@pytest.mark.parametrize("setting", [True, False])
def test_the_users_setting_is_binding(setting):
    problem = with_nodes(within(SLOW))
    groups = tuple(replace(g, reshard=setting) for g in problem.groups)
    assert held(plan_step(replace(problem, groups=groups, budget_bytes=10**9))) == []


def test_what_gains_little_is_left():
    """A communicator costs, too."""
    planned = plan_step(with_nodes(within(layers(8, gather_us=81.0)), faster=1.01))
    assert held(planned) == []


def test_two_smaller_meshes_contradict_each_other():
    problem = with_nodes(SLOW)
    first = replace(problem.groups[0], post_forward=PostForwardMesh(10, 0))
    with pytest.raises(PlanError, match="two smaller meshes"):
        checked(replace(problem, groups=(first, *problem.groups[1:])))


@settings(deadline=None, max_examples=10, derandomize=True)
@given(seed=st.integers(0, 10**6), share=st.floats(0.7, 2.0), ranks=st.integers(2, 8))
def test_any_problem(seed, share, ranks):
    problem = random_problem(seed, 8)
    nodes = with_nodes(problem, ranks)
    check(nodes, share)
    try:
        plain = plan_step(within(problem, share))
    except InfeasibleBudget:
        return
    planned = plan_step(within(nodes, share))
    assert planned.estimate.step_time_us <= plain.estimate.step_time_us
    if held(planned):
        gained = (1 - NODES_WORTH) * plain.estimate.step_time_us
        assert planned.estimate.step_time_us <= gained * (1 + 1e-9)
    # What is simulated from the steps alone is what the search has found.
    again = simulate(checked(nodes), planned.schedules, planned.recompute, planned.across)
    assert again.step_us == planned.estimate.step_time_us
    assert again.peak_bytes == planned.estimate.peak_bytes


def test_small_problems_are_near_the_optimum():
    gaps = []
    for seed in range(60):
        problem = small_problem(seed)
        if len(problem.groups) > 3:
            continue
        problem = within(with_nodes(problem), (1.0, 1.2, 0.9)[seed % 3])
        try:
            found_us = plan_step(problem).estimate.step_time_us
        except InfeasibleBudget:
            continue
        best_us = optimum(problem, problem.budget_bytes, found_us) or found_us
        gaps.append(found_us / best_us - 1)
    print(f"{len(gaps)} problems: mean gap {mean(gaps):.4%}, worst {max(gaps):.4%}")
    assert len(gaps) >= 20
    assert mean(gaps) <= 0.01


def planned(problem):
    found = plan_step(problem)
    groups = tuple(GroupInfo(g.id, g.fqn, (), 8, True, g.gathered_bytes) for g in problem.groups)
    return Plan("p", "2.13.0", groups, *found.schedules, estimate=found.estimate)


def test_a_plan_file_has_what_nodes_hold():
    plan = planned(with_nodes(within(SLOW)))
    assert {s.on_node for s in plan.forward.steps} == {True, False}
    text = plan.to_json()
    assert '"on_node": true' in text
    assert '"on_node": false' not in text
    off = plan.on_fsdp2_groups()
    assert not any(s.on_node for schedule in off.schedules for s in schedule.steps)
    assert [s.kind for s in off.forward.steps] == [s.kind for s in plan.forward.steps]
    assert off.fingerprint != plan.fingerprint


def test_views_say_what_nodes_hold():
    before, after = planned(within(SLOW)), planned(with_nodes(within(SLOW)))
    rows = {row.groups: row.text for row in moves(before, after)}
    assert rows["layers.0",] == "held until backward by the ranks of each node"
    names = {g.id: g.fqn for g in after.groups}
    texts = [step_text(step, names) for schedule in after.schedules for step in schedule.steps]
    assert "keep on each node a shard of layers.0" in texts
    assert "issue all-gather layers.0 on each node" in texts
    differs = signature.difference({0: before.collective_signature, 1: after.collective_signature})
    assert " on each node (" in differs
