"""From a placed program to a problem: parts of a huge group add up to the group."""

from dataclasses import replace

import pytest
from graphs import Sketch, aten, group, program
from hypothesis import given
from hypothesis import strategies as st

from graphshard.compiler.planning import run_passes
from graphshard.cost.comm import CollectiveKind, MeasuredCurve, RankGroup
from graphshard.cost.curve import line
from graphshard.cost.presets import preset
from graphshard.errors import PlanError
from graphshard.fsdp2.settings import GroupSettings, TrainableShards
from graphshard.passes import PLACEMENT
from graphshard.planner.checked import checked
from graphshard.planner.choices import Bucket, Choices
from graphshard.planner.events import gather_events
from graphshard.planner.plan_step import fsdp2, plan_step
from graphshard.planner.problem import Category, Group, Part, Region, Transfer, Use
from graphshard.planner.regions import region_events
from graphshard.pricing import problem as posed
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.problem import MAX_PARTS, PlanningPolicy, price
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Direction, Schedule

OWN = GroupSettings(None, False, 2, 2, "lane 0", "lane 0", 64, TrainableShards(64, 16), 4)


def groups_of(*counts):
    """Groups of so many parameters, all of one size, read in forward one after the other."""
    graph = Sketch()
    graph.placeholder("run")
    x, anchors = graph.input("x"), [graph.anchor(number) for number in range(len(counts))]
    names = [[f"w{index}" for index in range(count)] for count in counts]
    weights = [
        graph.unshard(anchor, index, f"{name}_{number}")
        for number, (anchor, own) in enumerate(zip(anchors, names, strict=True))
        for index, name in enumerate(own)
    ]
    for weight in weights:
        x = graph.op(aten.mm.default, x, weight)
    groups = [group(number, *own) for number, own in enumerate(names)]
    return run_passes(program(*groups, forward=graph.done(x)), PLACEMENT)


def priced(made, *, first=OWN, own=OWN, regroup=True, **more):
    """The problem of `made`. first, own: settings of its first and its last group. more: of the
    machine."""
    machine = replace(preset("h100"), **more)
    costs = graph_costs(made, machine, recompute=False)
    settings = [first, *[OWN] * (len(made.groups) - 2), own]
    return price(costs, settings, machine, PlanningPolicy(regroup=regroup))


@pytest.mark.parametrize("issue_us", [0.0, 40.0])  # of a collective, whatever travels in it
def test_parts_add_up_to_the_group(issue_us):
    made = groups_of(1, 4)
    whole, parts = (priced(made, regroup=regroup, issue_us=issue_us) for regroup in (False, True))
    assert [len(g.parts) for g in whole.groups] == [1, 1]
    assert [len(g.parts) for g in parts.groups] == [1, 4]
    assert [p.params for p in parts.groups[1].parts] == [(0,), (1,), (2,), (3,)]
    assert parts.groups[1].gathered_bytes == whole.groups[1].gathered_bytes
    assert parts.groups[1].use_in(Direction.FORWARD) is not None
    together = [gather_events(p, Bucket((1,)), Direction.FORWARD) for p in (whole, parts)]
    for one, other in zip(*together, strict=True):
        assert one.comm_us == pytest.approx(other.comm_us, abs=1e-2)
        assert one.us == pytest.approx(other.us, abs=1e-2)
        assert (one.alloc_bytes, one.free_bytes) == (other.alloc_bytes, other.free_bytes)


def test_the_first_and_the_last_groups_that_can_may_travel_in_parts():
    problem = priced(groups_of(1, 4, 4, 4, 3, 3, 3, 1))
    assert [len(g.parts) for g in problem.groups] == [1, 4, 1, 1, 3, 3, 3, 1]


def test_the_root_may_travel_in_parts_and_is_neither_first_nor_last():
    problem = priced(groups_of(4, 4, 4, 4, 4, 3), own=replace(OWN, is_root=True))
    assert [len(g.parts) for g in problem.groups] == [4, 1, 4, 4, 4, 3]


def test_a_huge_group_may_travel_in_parts(monkeypatch):
    monkeypatch.setattr(posed, "HUGE", 1)
    problem = priced(groups_of(2, 2, 4, 2, 2, 2, 2))
    assert [len(g.parts) for g in problem.groups] == [2, 1, 4, 1, 2, 2, 2]


def test_a_part_is_due_when_its_parameters_are_read():
    parts = priced(groups_of(1, 4)).groups[1].parts
    firsts = [p.forward.first for p in parts]
    assert firsts == sorted(set(firsts))
    assert [p.forward.last for p in parts] == firsts


def test_there_are_few_parts_and_small_parameters_go_together():
    sizes = [len(p.params) for p in priced(groups_of(1, 30)).groups[1].parts]
    assert len(sizes) <= MAX_PARTS
    assert sum(sizes) == 30


def test_what_travels_its_own_way_is_neither_merged_nor_split():
    problem = priced(groups_of(1, 4), own=replace(OWN, regroups=False))
    assert not problem.regroup_gathers


def test_a_hook_that_others_may_wait_in_keeps_the_order_of_reductions():
    made = groups_of(1, 4)
    assert not priced(made).keeps_reduce_order
    assert priced(made, own=replace(OWN, has_all_reduce_hook=True)).keeps_reduce_order


def test_a_split_needs_less_memory_than_the_whole():
    problem = priced(groups_of(1, 4))
    own = fsdp2(problem)
    (schedule,) = plan_step(replace(problem, budget_bytes=own.peak_bytes - 1)).schedules
    assert isinstance(schedule, Schedule)
    assert any(step.params for step in schedule.steps)


def late_gradient():
    """Backward of one group in one region: a gradient, much that is temporary, another gradient."""
    forward, backward = Sketch(), Sketch()
    for graph in (forward, backward):
        graph.placeholder("run")
    x, anchor = forward.input("x"), forward.anchor(0)
    weights = [forward.unshard(anchor, i, name=f"w{i}") for i in range(2)]
    y = forward.op(aten.mm.default, forward.op(aten.mm.default, x, weights[0]), weights[1])
    grad, again = backward.input("tangents_1"), backward.anchor(0)
    w0 = backward.unshard(again, 0, name="w0")
    first = backward.op(aten.mm.default, grad, w0, name="dw1")
    kept = [backward.op(aten.mm.default, grad, w0) for _ in range(4)]
    for one in kept[1:]:
        kept[0] = backward.op(aten.add.Tensor, kept[0], one)
    last = backward.op(aten.mm.default, kept[0], w0, name="dw0")
    shown = backward.op(aten.t.default, last)
    tokens = [backward.reduce(g, again, i, f"t{i}") for g, i in ((shown, 0), (first, 1))]
    made = program(
        group(0, "first", "second"),
        forward=forward.done(y, anchor),
        backward=backward.done(None, *tokens),
    )
    return run_passes(made, PLACEMENT)


def test_a_gradient_counts_from_the_op_that_makes_it(monkeypatch):
    machine = preset("h100")
    costs = graph_costs(late_gradient(), machine, recompute=False, fused=True)
    problem = price(costs, [OWN], machine, PlanningPolicy())
    (region,), (part,) = problem.backward, problem.groups[0].parts
    assert (part.gradient.first, part.gradient.bytes) == (0, 128)
    # When the third sum is there (64, and 4 x 64 that are added up, and the anchor), the gradient
    # that the last op makes (64) is not.
    assert (region.activation_bytes, region.idle_bytes) == (324, 0)
    assert region.absent == (Allocation(Category.UNSHARDED_GRAD, 64, 0),)
    (event,) = region_events(problem, Choices(), Direction.BACKWARD)
    assert event.brief_bytes == -64


@pytest.mark.parametrize("per_node", [2, 1])
def test_lanes_that_use_one_link_share_it(per_node):
    """A rank has one part of the adapters, and one way to the others of its node: gathers of
    experts beside those of all else, over other ranks, are no faster."""
    own = replace(OWN, ranks_per_node=per_node)
    other = replace(own, ranks=4, gather_lane="lane 2", reduce_lane="lane 2")
    problem = priced(groups_of(1, 4), first=replace(own, reduce_lane="lane 1"), own=other)
    same = per_node == 1  # else "lane 2" goes between nodes, and the others do not
    assert {lane.name: lane.link for lane in problem.lanes} == {
        "lane 0": "lane 0", "lane 1": "lane 0", "lane 2": "lane 0" if same else "",
    }  # fmt: skip
    assert [lane.link for lane in priced(groups_of(1, 4)).lanes] == [""]


def test_a_rank_alone_shares_nothing():
    alone = replace(OWN, ranks=1, ranks_per_node=1, gather_lane="lane 2", reduce_lane="lane 2")
    problem = priced(groups_of(1, 4), first=OWN, own=alone)
    assert [lane.link for lane in problem.lanes] == ["", ""]


@pytest.fixture(scope="module")
def late_gradient_costs():
    return graph_costs(late_gradient(), preset("h100"), recompute=False)


times = st.floats(0.0, 1000.0)


@given(times, times, times)
def test_no_collective_takes_less_than_a_launch_of_its_lane(
    late_gradient_costs, gather_us, regather_us, reduce_us
):
    """A busy machine may measure that reductions take less than the launch of a gather."""
    gather, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    curves = (
        MeasuredCurve(gather, RankGroup(8, 2, "lane 0"), line(gather_us, 1e9)),
        MeasuredCurve(reduce, RankGroup(8, 2, "lane 0"), line(reduce_us, 1e9)),
        MeasuredCurve(gather, RankGroup(4, 2, "lane 1"), line(regather_us, 1e9)),
    )
    machine = replace(preset("h100"), measured=curves)
    own = replace(OWN, ranks=8, post_forward_ranks=4, post_forward_lane="lane 1")
    problem = checked(price(late_gradient_costs, [own], machine, PlanningPolicy()))
    (part,) = problem.groups[0].parts
    assert part.gradient.reduce.us == pytest.approx(reduce_us, abs=1e-2)
    assert problem.lanes[0].launch_us <= part.gradient.reduce.us
    with pytest.raises(PlanError, match=r"GS602: a collective of .* less than its launch"):
        checked(replace(problem, lanes=tuple(replace(x, launch_us=1001.0) for x in problem.lanes)))


# -- an int `reshard_after_forward` ----------------------------------------------------------------


SMALLER = replace(OWN, ranks=8, ranks_per_node=4, reshard=True)
ON_A_NODE = replace(SMALLER, post_forward_ranks=4, post_forward_lane="lane 1")


def test_backward_gathers_from_the_smaller_mesh():
    plain, smaller = (priced(groups_of(1, 1), first=SMALLER, own=o) for o in (SMALLER, ON_A_NODE))
    group = smaller.groups[1]
    (part,), (whole,) = group.parts, plain.groups[1].parts
    assert group.post_forward is not None
    assert group.post_forward.held_bytes == group.gathered_bytes // 4
    assert smaller.lanes[group.lane_in(Direction.BACKWARD)].name == "lane 1"
    assert smaller.lanes[group.lane_in(Direction.FORWARD)].name == "lane 0"
    assert part.gather == whole.gather
    assert part.regather is not None
    assert part.regather.us < part.gather.us


@pytest.mark.parametrize(("nodes", "shares"), [(1, True), (2, False)])
def test_a_smaller_mesh_on_one_node_does_not_share_the_link_between_nodes(nodes, shares):
    own = replace(ON_A_NODE, ranks_per_node=8 // nodes)
    problem = priced(groups_of(1, 1), first=replace(SMALLER, ranks_per_node=8 // nodes), own=own)
    assert (problem.lanes[0].link == problem.lanes[1].link != "") == shares


def test_what_stays_gathered_unread_is_alive_until_backward_ends():
    regions = tuple(Region(1.0, activation_bytes=10 * number) for number in range(3))
    read, unread = Part(100, Transfer(1.0), Use(0, 1), Use(0, 2)), Part(7, Transfer(1.0), Use(0, 0))
    groups = [Group(number, "", (part,), 0, 0) for number, part in enumerate((read, unread))]
    forward, backward = posed.with_unread(regions, regions, groups)
    assert [region.activation_bytes for region in forward] == [0, 17, 27]
    assert [region.activation_bytes for region in backward] == [7, 17, 27]
    assert posed.with_unread(regions, (), groups) == (regions, ())
