"""The all-reduce over replicas (HSDP): its price, its lane, and what it hides behind."""

import json
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import layers, random_problem, with_replicas
from plans import group
from plans import plan as made_by_hand
from promises import planned_within
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from graphshard.cost.comm import CollectiveKind, RankGroup, network_us
from graphshard.cost.plan_formula import step_time_formula
from graphshard.cost.whatif import cluster_of, what_if
from graphshard.errors import PlanError
from graphshard.offline.api import machine_of
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.world import Made
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.checked import checked
from graphshard.planner.compare import placed_as, schedules
from graphshard.planner.fsdp2 import cpu_placement, eager_placement, fsdp2_choices
from graphshard.planner.links import LaneQueues
from graphshard.planner.memo import Memo
from graphshard.planner.observed import observed
from graphshard.planner.plan_step import fsdp2, plan_step
from graphshard.planner.problem import CollectiveLane
from graphshard.planner.simulate import simulate
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.forecast import CollectiveTime
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Lane, Plan, StepKind
from graphshard.schedule.reasons import Gain
from graphshard.schedule.replay import critical_path, replayed
from graphshard.schedule.steps import ISSUES
from graphshard.view.html import render
from graphshard.view.lanes import lane_rows
from graphshard.view.log_text import log_text
from graphshard.view.scenario import scenarios
from graphshard.view.sheet import sheet_of
from graphshard.view.summary import summary_lines
from graphshard.view.trace import trace
from graphshard.view.why import why_text

ALL_REDUCE = (StepKind.ALL_REDUCE_ISSUE, StepKind.ALL_REDUCE_WAIT)
RANKS, WIDTH = 32, 1024

# -- offline: what the network between nodes makes of it -------------------------------------------


def hybrid(shape: tuple[int, int] = (4, 8)) -> Made:
    """Replicas over nodes, shards in each."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    for module in (*model, model):
        if list(module.parameters(recurse=module is not model)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Made(model, (torch.randn(4096, WIDTH),), {})


RATES = (6.0, 6000.0)  # bytes in a microsecond between nodes: 6 MB/s and 6 GB/s


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    machine = machine_of("h100-ethernet100")
    points = []
    for rate in RATES:
        network = replace(machine.network, inter_bytes_per_us=rate)
        own = replace(machine, network=network, measured=())
        points.append(Point(RANKS, 8, own, PlanningPolicy(None)))
    return [answer.plan for answer in Study("plan", lambda sizes: hybrid(), points).answers()]


def all_reduces(plan: Plan) -> list[CollectiveTime]:
    steps, forecast = plan.backward.steps, plan.forecasts[-1]
    return [c for c in forecast.collectives if steps[c.issue].lane is Lane.ALL_REDUCE]


def test_a_step_takes_longer_where_nodes_are_slower_connected(plans: list[Plan]) -> None:
    slow, fast = plans
    assert slow.estimate.ours.step_time_us > 10 * fast.estimate.ours.step_time_us
    assert slow.estimate.fsdp2.step_time_us > 10 * fast.estimate.fsdp2.step_time_us
    for plan in plans:
        assert plan.estimate.lower_bound_us <= plan.estimate.ours.step_time_us
        assert sum(forecast.us for forecast in plan.forecasts) == plan.estimate.ours.step_time_us
    assert slow.estimate.lower_bound_us > 10 * fast.estimate.lower_bound_us


@pytest.mark.parametrize("number", [0, 1])
def test_its_price_is_that_of_one_rank_on_each_node(plans: list[Plan], number: int) -> None:
    """Each rank of a node adds its own shard up with one rank of each other node, over its own
    share of the node's adapters."""
    plan, network = plans[number], machine_of("h100-ethernet100").network
    network = replace(network, inter_bytes_per_us=RATES[number])
    shard_bytes = plan.groups[0].reduce_bytes // 8
    us = float(network_us(network, CollectiveKind.ALL_REDUCE, RankGroup(4, 1), shard_bytes))
    assert [c.us for c in all_reduces(plan)] == pytest.approx([us] * 6, rel=1e-3)
    least_us = 2 * 3 / 4 * shard_bytes / RATES[number]
    assert us > least_us
    assert {g.replicas for g in plan.groups} == {4}


def test_it_has_a_lane_of_its_own(plans: list[Plan]) -> None:
    for plan in plans:
        own = {c.lane for c in all_reduces(plan)}
        others = {c.lane for f in plan.forecasts for c in f.collectives} - own
        assert len(own) == 1 == len(others)
        starts = [c.start_us for c in all_reduces(plan)]
        ends = [c.end_us for c in all_reduces(plan)]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_views_show_it(plans: list[Plan]) -> None:
    plan = Plan.from_json(plans[0].to_json())
    assert plan == plans[0]
    assert plan.summary().all_reduces == 6
    assert "all-reduces" in summary_lines(plan)
    assert "6 reduce-scatters and 6 all-reduces per step" in log_text(plan)
    sheet = sheet_of(plan)
    rows = {row.name: row for row in lane_rows(sheet)}
    assert [mark.kind for mark in rows["all-reduce"].marks] == ["all-reduce"] * 6
    assert ("ranks", "4") in rows["all-reduce"].marks[0].card
    exposed_us = sum(bar.exposed_us for bar in sheet.collectives)
    assert exposed_us == pytest.approx(plan.estimate.ours.exposed_us)
    events = trace(plan)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names.count("all-reduce") == 2  # this plan's, and FSDP2's
    for number, scenario in enumerate(scenarios(plan), 1):
        slices = [e for e in events if e.get("cat") == "exposed" and e["pid"] == number]
        assert sum(e["dur"] for e in slices) == pytest.approx(scenario.exposed_us)
    assert "backward, issue all-reduce" in why_text(plan, "0")
    assert '<i class="all-reduce"></i>all-reduce over replicas' in render(plan)


def test_a_plan_of_before_opens() -> None:
    """It has neither the number of replicas nor steps for their all-reduce."""
    one = replace(group(0, "a"), reduce_dtype="float32", reduce_bytes=200, replicated=True)
    backward = "compute 2, reduce 0, reduced 0"
    old = made_by_hand([one], "issue 0, wait 0, compute 1, release 0", backward)
    data = json.loads(old.to_json())
    assert data["groups"][0].pop("replicas") == 1
    opened = Plan.from_data(data)
    assert opened == old
    assert opened.summary().all_reduces == 0


def test_what_if_knows_the_replicas(plans: list[Plan]) -> None:
    """The same schedule between nodes that are as slow as in the other plan."""
    slow, fast = plans
    here = cluster_of(fast)
    machines = [
        replace(
            here.machine,
            network=replace(here.machine.network, inter_bytes_per_us=rate),
            measured=(),
        )
        for rate in RATES
    ]
    there, own = (replace(here, machine=machine) for machine in machines)
    assert what_if(fast, own, own).step_time_us == pytest.approx(fast.estimate.ours.step_time_us)
    moved = what_if(fast, own, there)
    assert moved.step_time_us == pytest.approx(slow.estimate.ours.step_time_us, rel=0.05)
    assert "inter" in str(step_time_formula(fast, own)).lower()


# -- planner ---------------------------------------------------------------------------------------


def collectives_of(problem, planned):
    """By lane, in order."""
    found = simulate(problem, planned.schedules, planned.recompute, planned.across)
    return found, [c for c in found.collectives if c.step.lane is Lane.ALL_REDUCE]


@pytest.mark.parametrize("activations", [0, 10**6], ids=["", "much else in memory"])
def test_it_hides_behind_compute_but_for_its_tail(activations):
    """Backward takes 200 us a layer, a reduction 30, an all-reduce 60.

    The last but one is reduced while the last layer computes, and waited for after that.
    """
    plain = layers(6, reduce_us=30.0, gather_us=30.0, activations=activations)
    problem = with_replicas(plain, slower=2.0, launch_us=0.0)
    planned = plan_step(problem)
    found, all_reduces = collectives_of(problem, planned)
    assert [c.exposed_us for c in all_reduces] == [0.0] * 4 + [30.0, 60.0]
    without = plan_step(plain)
    assert planned.estimate.ours.step_time_us == without.estimate.ours.step_time_us + 90.0
    assert found.exposed_us == planned.estimate.ours.exposed_us


def test_where_it_is_the_limit_its_lane_is_never_idle():
    problem = with_replicas(layers(6, reduce_us=30.0, gather_us=30.0), slower=10.0, launch_us=0.0)
    planned = plan_step(problem)
    _, all_reduces = collectives_of(problem, planned)
    assert all(a.finished_us == b.started_us for a, b in pairwise(all_reduces))
    bound_us = lower_bound_us(checked(problem))
    # The first one starts with the region after its reduction is done.
    assert bound_us <= planned.estimate.ours.step_time_us <= bound_us + 2 * 200.0


def test_fsdp2_starts_it_when_its_reduction_is_done():
    """On a stream of its own; on a CPU it waits for each."""
    problem = checked(with_replicas(layers(4, reduce_us=30.0), slower=2.0, launch_us=0.0))
    memo = Memo(problem)
    for place, waits in ((eager_placement, False), (cpu_placement, True)):
        own = placed_as(memo, fsdp2_choices(problem), place)
        found = simulate(problem, schedules(memo, own))
        reduces = [c for c in found.collectives if c.step.lane is Lane.REDUCE_SCATTER]
        ours = [c for c in found.collectives if c.step.lane is Lane.ALL_REDUCE]
        assert [c.started_us for c in ours] == [c.finished_us for c in reduces]
        assert all(c.exposed_us == 60.0 for c in ours) is waits
        ends = [c.awaited_us for c in ours]
        assert (len(set(ends)) == 1) is not waits or ends == sorted(ends)


def test_what_is_added_to_earlier_gradients_stays_until_then():
    """So it takes as much as where it becomes the gradient."""
    plain, adding = (layers(8, has_gradients=adds) for adds in (False, True))
    assert fsdp2(adding).peak_bytes < fsdp2(plain).peak_bytes
    assert fsdp2(with_replicas(adding)).peak_bytes == fsdp2(plain).peak_bytes
    assert fsdp2(with_replicas(plain)).peak_bytes == fsdp2(plain).peak_bytes


def test_gradients_that_are_used_at_once_are_waited_for_when_they_are_there():
    problem = with_replicas(layers(6, reduce_us=30.0), slower=1.0)
    late, early = (plan_step(replace(problem, early_waits=early)) for early in (False, True))
    waits = [
        [i for i, s in enumerate(found.schedules[-1].steps) if s.kind is StepKind.ALL_REDUCE_WAIT]
        for found in (late, early)
    ]
    ends = [len(found.schedules[-1].steps) for found in (late, early)]
    assert waits[0] == list(range(ends[0] - 6, ends[0]))
    assert waits[1][0] < ends[1] - 12


def test_lanes_of_one_link_share_it_with_what_follows():
    """An all-reduce that follows a reduction over the same link, while another one runs there."""
    lanes = [CollectiveLane(name, 0.0, "x") for name in "abc"]
    queues = LaneQueues(lanes)
    queues.issue(1, 0, 10.0, 0.0)
    queues.issue(2, 1, 10.0, 0.0, after=1)
    queues.issue(3, 0, 10.0, 0.0)
    assert [queues.end_us(job) for job in (1, 2, 3)] == [10.0, 30.0, 30.0]
    assert queues.started_us == {1: 0.0, 2: 10.0, 3: 10.0}
    queues.issue(4, 0, 10.0, 30.0)
    queues.issue(5, 1, 0.0, 30.0, after=4)  # of one replica: it takes no time
    queues.issue(6, 2, 2.0, 30.0)
    assert [queues.end_us(job) for job in (4, 5, 6)] == [42.0, 42.0, 34.0]
    assert queues.started_us[5] == 42.0


def test_the_bound_knows_what_follows_what():
    problem = with_replicas(layers(1, reduce_us=30.0), slower=2.0, launch_us=0.0)
    ends_us = 80.0 + 100.0 + 200.0 + 30.0 + 60.0
    assert lower_bound_us(checked(problem)) == ends_us
    assert plan_step(problem).estimate.ours.step_time_us == ends_us
    # Where the all-reduces are the limit: all of them, behind the first reduction.
    slow = with_replicas(layers(6, reduce_us=30.0, gather_us=30.0), slower=20.0, launch_us=0.0)
    forward_us, first_us = 30.0 + 600.0, 200.0 + 30.0
    assert lower_bound_us(checked(slow)) == forward_us + first_us + 6 * 600.0


numbers = st.integers(0, 10**6)
drawn = settings(deadline=None, max_examples=30, derandomize=True)


def replicated(seed, **kwargs):
    slower, link = ((0.3, 1.0, 4.0)[seed % 3], ("", "", "wire")[seed % 7 % 3])
    problem = random_problem(seed, 8, **kwargs)
    return with_replicas(problem, slower, 5.0, link, (1.0, 0.6)[seed % 2], seed)


@drawn
@given(numbers, st.floats(0.7, 2.0))
def test_random_problems(seed, share):
    """What holds of any plan holds with replicas: budget, bound, gains, and what the runtime needs.

    But one thing: FSDP2's own streams may start an all-reduce before compute comes to its wait.
    """
    problem = checked(replicated(seed))
    _, planned = planned_within(problem, share)
    if planned is None:
        return
    estimate = planned.estimate
    assert estimate.lower_bound_us <= min(estimate.step_time_us, estimate.fsdp2.step_time_us)
    gains = [reason for reason in planned.reasons if isinstance(reason, Gain)]
    assert sum(g.gain_us for g in gains) == estimate.fsdp2.step_time_us - estimate.step_time_us
    found = simulate(problem, planned.schedules, planned.recompute, planned.across)
    assert (found.step_us, found.peak_bytes) == (estimate.step_time_us, estimate.peak_bytes)
    for schedule in planned.schedules:
        runs_as_planned(problem, schedule)
    for schedule, forecast in zip(planned.schedules, planned.forecasts, strict=True):
        replays_as_forecast(problem, schedule, forecast)
    assert planned.fsdp2 is not None
    for schedule, forecast in zip(planned.fsdp2.schedules, planned.fsdp2.forecasts, strict=True):
        replays_as_forecast(problem, schedule, forecast)


def runs_as_planned(problem, schedule):
    """Each all-reduce is issued where its reduction is waited for, and awaited once, later; all in
    one order."""
    steps = schedule.steps
    replicas = {g.id for g in problem.groups if g.all_reduce_lane is not None}
    waits = [s.groups for s in steps if s.kind is StepKind.REDUCE_WAIT and s.group in replicas]
    issued, awaited = ([s.groups for s in steps if s.kind is kind] for kind in ALL_REDUCE)
    assert issued == waits
    assert sorted(awaited) == sorted(issued)
    for index, step in enumerate(steps):
        if step.kind is StepKind.ALL_REDUCE_ISSUE:
            assert steps[index - 1].kind is StepKind.REDUCE_WAIT
            assert steps[index - 1].groups == step.groups


def replays_as_forecast(problem, schedule, forecast):
    """Where no link is shared: replaying knows of none."""
    path = critical_path(schedule, forecast)
    assert path.work_us + sum(c.us for c in path.collectives) <= forecast.us
    if any(lane.link for lane in problem.lanes):
        return
    assert path.work_us + sum(c.us for c in path.collectives) == forecast.us
    found = replayed(schedule, forecast, lambda _, us: us, lambda c: c.us)
    assert (found.us, found.exposed_us) == (forecast.us, forecast.exposed_us)
    by_issue = {schedule.steps[c.issue].identity: c for c in forecast.collectives}
    for identity, found in by_issue.items():
        first = by_issue.get(identity._replace(kind=StepKind.REDUCE_ISSUE))
        if identity.kind is StepKind.ALL_REDUCE_ISSUE and first is not None:
            assert found.start_us >= first.end_us


@drawn
@given(numbers)
def test_what_is_measured_takes_the_place_of_its_price(seed):
    problem = checked(replicated(seed, options=False, micro=False))
    planned = plan_step(problem)
    segments = []
    for schedule in planned.schedules:
        own = [
            Segment(step, 3.0, comm_us=777.0 if step.kind in ISSUES and not step.kept else None)
            for step in split(problem, schedule)
        ]
        segments.append(tuple(own))
    found = observed(problem, Measured(4, 1.0, 0.0, *segments))
    seen = [
        part.gradient.all_reduce.us
        for group in found.groups
        for part in group.parts
        if part.gradient is not None and part.gradient.all_reduce is not None
    ]
    parts = [len([p for p in g.parts if p.gradient]) for g in found.groups if g.all_reduce_lane]
    launch_us = problem.lanes[-1].launch_us
    assert sum(seen) == pytest.approx(sum(777.0 + launch_us * (n - 1) for n in parts if n), abs=0.1)


def split(problem, schedule):
    """Steps with one compute step for each region."""
    sizes = [region.num_ops for region in problem.regions(schedule.direction)]
    stops = set(accumulate(sizes))
    for step in schedule.steps:
        if step.kind is not StepKind.COMPUTE:
            yield step
            continue
        start = step.start
        for stop in sorted(s for s in stops if step.start < s <= step.stop):
            yield replace(step, start=start, stop=stop)
            start = stop


def test_a_problem_says_where_its_all_reduces_run():
    problem = with_replicas(layers(2))
    groups = (replace(problem.groups[0], all_reduce_lane=None), problem.groups[1])
    with pytest.raises(PlanError, match=r"GS602.*an all-reduce without a lane"):
        checked(replace(problem, groups=groups))
    with pytest.raises(PlanError, match=r"GS602.*less than its launch"):
        checked(replace(problem, lanes=(*problem.lanes[:2], CollectiveLane("replicas", 1e6))))
    with pytest.raises(PlanError, match=r"GS603.*a group without replicas"):
        simulate(layers(2), plan_step(problem).schedules)
