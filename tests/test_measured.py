"""What collectives took of their lanes, where not every end is known."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.schedule.measured import CollectiveTiming, DirectionRun, Issued, lane_times

MARKS = (0.0, 1e6)


@dataclass(frozen=True)
class Sent:
    """A collective as it was: issued so long after the one before, and what it took."""

    after_us: float
    took_us: float
    weight: float
    known: bool


def timings_of(lane: list[Sent]) -> dict[int, CollectiveTiming]:
    found, issued, free_at = {}, 0.0, 0.0
    for index, one in enumerate(lane):
        issued += one.after_us
        free_at = max(issued, free_at) + one.took_us
        found[index] = CollectiveTiming(issued, free_at if one.known else None)
    return found


def times_of(lane: list[Sent]) -> dict[int, float]:
    issued = {index: Issued(0, one.weight) for index, one in enumerate(lane)}
    return lane_times(DirectionRun(MARKS, timings_of(lane)), issued)


us = st.floats(2.0, 1e3)
lanes = st.lists(
    st.builds(Sent, st.floats(0.0, 1e3), us, us, st.booleans()), min_size=1, max_size=8
)


@given(lanes, st.floats(0.1, 10.0))
def test_weights_in_the_right_proportion_give_what_each_took(lane: list[Sent], factor: float):
    right = [Sent(s.after_us, s.took_us, factor * s.took_us, s.known) for s in lane]
    last = max((i for i, s in enumerate(lane) if s.known), default=-1)
    expected = {i: pytest.approx(s.took_us, rel=1e-6) for i, s in enumerate(lane) if i <= last}
    assert times_of(right) == expected


@given(lanes)
def test_between_two_known_ends_no_weight_counts(lane: list[Sent]):
    found = times_of(lane)
    before = Sent(0.0, 0.0, 0.0, known=True)
    for index, (first, second) in enumerate(pairwise([before, *lane])):
        if first.known and second.known:
            assert found[index] == pytest.approx(second.took_us, rel=1e-6)


@given(lanes)
def test_what_is_shared_out_ends_where_it_is_known_to_end(lane: list[Sent]):
    found, timings = times_of(lane), timings_of(lane)
    free_at = 0.0
    for index, took_us in found.items():
        free_at = max(timings[index].issued, free_at) + took_us
        if lane[index].known:
            assert free_at <= timings[index].done * (1 + 1e-6) + len(lane)
            free_at = timings[index].done


def test_lanes_do_not_share_and_what_nobody_planned_is_left_out():
    timings = {
        0: CollectiveTiming(0.0, 10.0),
        1: CollectiveTiming(0.0, 40.0),
        2: CollectiveTiming(5.0, 30.0),
    }
    issued = {0: Issued(0, 1.0), 1: Issued(1, 1.0)}
    assert lane_times(DirectionRun(MARKS, timings), issued) == {0: 10.0, 1: 40.0}
