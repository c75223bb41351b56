"""Plan -> rows in program order, and the summary that is made of them."""

from itertools import pairwise

import pytest
from plans import group, plan, two_layers

from graphshard.schedule.plan import Direction, Lane
from graphshard.view.summary import summary_lines
from graphshard.view.text import bytes_text
from graphshard.view.timeline import POINT_SHARE, Bar, LaneSegment, axis_edges, timeline


def segments(rows, lane):
    return next(r.segments for r in rows.lanes if r.lane is lane)


def deep(num_layers):
    """Layers resharded after forward, gathered one ahead, reductions awaited at the end."""
    forward = "".join(f"issue {i}, wait {i}, compute 9, release {i}," for i in range(num_layers))
    back = reversed(range(num_layers))
    backward = "".join(f"issue {i}, wait {i}, compute 9, release {i}, reduce {i}," for i in back)
    backward += ",".join(f"reduced {i}" for i in reversed(range(num_layers)))
    return plan([group(i, f"layers.{i}") for i in range(num_layers)], forward, backward)


def test_all_gathers_span_from_issue_to_wait():
    found = segments(timeline(two_layers()), Lane.ALL_GATHER)
    assert [(s.group, s.first, s.last) for s in found if not s.kept] == [
        (0, 0, 1),
        (1, 2, 5),
        (0, 9, 14),
    ]


def test_a_kept_gather_is_no_all_gather_and_covers_its_wait_alone():
    (kept,) = [s for s in segments(timeline(two_layers()), Lane.ALL_GATHER) if s.kept]
    assert (kept.group, kept.direction, kept.first, kept.last) == (1, Direction.BACKWARD, 10, 10)


def test_reductions_span_from_issue_to_wait_and_stack_where_they_overlap():
    lane = next(r for r in timeline(two_layers()).lanes if r.lane is Lane.REDUCE_SCATTER)
    found = [(s.group, s.first, s.last, s.row) for s in lane.segments]
    assert found == [(1, 13, 18, 0), (0, 17, 19, 1)]
    assert lane.depth == 2


def test_compute_segments_keep_program_order_and_count_ops():
    found = segments(timeline(two_layers()), Lane.COMPUTE)
    assert [(s.first, s.num_ops) for s in found] == [(3, 4), (6, 3), (11, 5), (15, 6)]
    assert [s.direction.value for s in found] == ["forward"] * 2 + ["backward"] * 2


def test_an_issue_without_a_wait_runs_to_the_end_of_its_direction():
    rows = timeline(plan([group(0, "")], "issue 0, compute 2", "compute 3"))
    (segment,) = segments(rows, Lane.ALL_GATHER)
    assert segment == LaneSegment(Lane.ALL_GATHER, Direction.FORWARD, 0, 1, group=0, awaited=False)


def test_a_group_gathered_twice_in_one_direction_has_two_segments():
    text = "issue 0, wait 0, release 0, issue 0, wait 0, release 0"
    rows = timeline(plan([group(0, "")], text))
    assert [(s.first, s.last) for s in segments(rows, Lane.ALL_GATHER)] == [(0, 1), (3, 4)]
    assert [(b.first, b.last) for b in rows.residency[0].bars] == [(0, 2), (3, 5)]


def test_residency_rows_follow_the_groups_and_say_from_where_a_group_is_kept():
    first, second = timeline(two_layers()).residency
    assert first.bars == (Bar(0, 4, None, True), Bar(9, 16, None, True))
    assert second.bars == (Bar(2, 12, kept_from=7, released=True),)


def test_a_group_never_released_is_shown_as_such():
    rows = timeline(plan([group(0, "")], "issue 0, wait 0, compute 1, release 0 kept"))
    assert rows.residency[0].bars == (Bar(0, 3, kept_from=3, released=False),)


def test_a_group_never_gathered_has_an_empty_row():
    rows = timeline(plan([group(0, "used"), group(1, "unused")], "issue 0, wait 0, release 0"))
    assert rows.residency[1].bars == ()


def test_axis_is_in_program_order_and_sized_by_ops():
    rows = timeline(two_layers())
    assert rows.edges[0] == 0
    assert rows.edges[-1] == pytest.approx(1)
    assert len(rows.edges) == len(rows.steps) + 1
    widths = [b - a for a, b in pairwise(rows.edges)]
    assert widths[3] / widths[6] == pytest.approx(4 / 3)
    assert sum(widths[i] for i in (3, 6, 11, 15)) == pytest.approx(1 - POINT_SHARE)
    assert min(widths) > 0


@pytest.mark.parametrize(
    "text", ["", "compute 0", "compute 5", "issue 0, wait 0", "compute 0, issue 0"]
)
def test_axis_of_odd_schedules(text):
    edges = axis_edges(plan([group(0, "")], text).forward.steps)
    assert list(edges) == sorted(edges)
    assert edges[-1] in (0, pytest.approx(1))


def test_curve_divider_and_peak():
    rows = timeline(two_layers())
    assert (rows.divider, rows.peak_step) == (8, 1)
    assert rows.gathered_bytes[1] == 200
    assert rows.direction_of(7) is Direction.FORWARD
    assert rows.direction_of(8) is Direction.BACKWARD


PLANS = {
    "two layers": two_layers(),
    "eighty layers": deep(80),
    "forward only": plan([group(0, "")], "issue 0, wait 0, compute 1, release 0"),
    "empty": plan([], ""),
    "hostile": plan([group(0, "</script><script>x()</script>")], "issue 0", name="<img src=//x>"),
}


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS.keys())
def test_summary_fits_its_width(case):
    text = summary_lines(case)
    assert text.isascii()
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 80


def test_summary_says_what_runs():
    lines = summary_lines(two_layers()).splitlines()
    assert lines[0] == "toy, 2 ranks, torch 2.13.0"
    assert [line.split()[0] for line in lines[2:7]] == ["step", "exposed", "peak", "limit", "gain"]
    assert lines[2:5] == [
        "step         30.0 us predicted; FSDP2 40.0 us (-25.0 %)",
        "exposed      6.00 us; FSDP2 15.0 us (-60.0 %)",
        "peak         200 B; FSDP2 180 B (+20 B)",
    ]
    assert lines[5] == "limit        200 B; a budget that was set"
    assert lines[6] == "gain         25.0 % less time than FSDP2; at most 20.0 % left to gain"
    assert [line.split() for line in lines[8:13]] == [
        ["forward", "backward", "step"],
        ["all-gathers", "2", "1", "3"],
        ["kept,", "no", "all-gather", "0", "1", "1"],
        ["reduce-scatters", "0", "2", "2"],
        ["ops", "7", "11", "18"],
    ]
    assert lines[14:16] == [
        "gathered     at most 200 B",
        "             at step 1 (forward): wait for all-gather layers.0",
    ]
    assert [line.split()[-1] for line in lines[-2:]] == ["resharded", "kept"]


def test_summary_folds_groups_that_are_alike():
    lines = summary_lines(deep(80)).splitlines()
    assert lines[-1].startswith("layers.0-79 (80) ")
    assert lines[-2].startswith("group")
    assert [line.split()[0] for line in summary_lines(two_layers()).splitlines()[-2:]] == [
        "layers.0",
        "layers.1",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**20 + 2**19, "3.5 MiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**50, "3,072.0 TiB"),
    ],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text
