"""When collectives end: queues, and links that several lanes share."""

from graphshard.planner.links import LaneQueues
from graphshard.planner.problem import CollectiveLane

LANES = (
    CollectiveLane("gather", 10.0, "net"),
    CollectiveLane("reduce", 10.0, "net"),
    CollectiveLane("other", 10.0),
)


def test_a_lane_is_a_queue():
    wires = LaneQueues(LANES)
    for job in range(3):
        wires.issue(job, 2, 100.0, 5.0 * job)
    assert [wires.end_us(job) for job in range(3)] == [100.0, 200.0, 300.0]
    assert wires.started_us == {0: 0.0, 1: 100.0, 2: 200.0}


def test_one_lane_of_a_link_alone_is_a_queue_too():
    wires = LaneQueues(LANES)
    for job in range(3):
        wires.issue(job, 0, 100.0, 5.0 * job)
    assert [wires.end_us(job) for job in range(3)] == [100.0, 200.0, 300.0]


def test_two_lanes_share_a_link_but_not_their_launches():
    wires = LaneQueues(LANES)
    wires.issue(0, 0, 100.0, 0.0)  # on the link from 10 on
    wires.issue(1, 1, 40.0, 20.0)  # from 30 on: 70 and 30 are left, half as fast each
    assert wires.end_us(1) == 90.0
    assert wires.end_us(0) == 130.0


def test_what_is_issued_later_slows_what_is_under_way():
    wires = LaneQueues(LANES)
    wires.issue(0, 0, 110.0, 0.0)
    wires.issue(1, 1, 20.0, 50.0)
    assert wires.end_us(0) == 120.0
    assert wires.end_us(1) == 80.0


def test_an_unknown_collective_never_ends():
    assert LaneQueues(LANES).end_us(7) is None


def test_to_wait_on_one_link_leaves_the_other_where_it_is():
    wires = LaneQueues(
        (
            CollectiveLane("a", 0.0, "a"),
            CollectiveLane("b", 0.0, "b"),
            CollectiveLane("c", 0.0, "a"),
        )
    )
    wires.issue(0, 0, 100.0, 0.0)
    wires.issue(1, 1, 10.0, 0.0)
    assert wires.end_us(1) == 10.0
    wires.issue(2, 2, 20.0, 10.0)  # shares link a from now on, not after job 0
    assert (wires.end_us(2), wires.end_us(0)) == (50.0, 120.0)
