"""What was predicted for each step, and what was measured of it."""

from dataclasses import replace

import pytest
from forecasts import as_predicted, measured, planned
from planning import layers
from plans import two_layers

from graphshard.schedule.measured import Segment
from graphshard.schedule.plan import Direction, Plan, StepKind
from graphshard.view.comparison import comparison_text


def test_each_step_starts_where_the_one_before_ends():
    plan = planned(layers(5, gather_us=150.0, root=True))
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=True):
        starts_us = [time.start_us for time in forecast.steps]
        ends_us = [time.end_us for time in forecast.steps]
        assert [0.0, *ends_us[:-1]] == starts_us
        waits = (StepKind.GATHER_WAIT, StepKind.REDUCE_WAIT)
        pairs = zip(schedule.steps, forecast.steps, strict=True)
        assert all(t.exposed_us == 0 for s, t in pairs if s.kind not in waits)
        for found in forecast.collectives:
            assert found.start_us >= ends_us[found.issue]
        lanes = [c for c in forecast.collectives if c.lane == 0]
        ends = [c.end_us for c in lanes]
        assert all(c.start_us >= end for c, end in zip(lanes[1:], ends, strict=False))
    assert plan.estimate.step_time_us == sum(f.us for f in plan.forecasts)
    assert plan.estimate.exposed_us == sum(f.exposed_us for f in plan.forecasts)


def test_the_forecast_is_in_the_plan_file():
    plan = planned(layers(3))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_measurement_as_predicted_has_no_error():
    plan = planned(layers(4, gather_us=150.0))
    found = plan.compare(as_predicted(plan))
    assert found.step_time.error == found.exposed.error == 0
    assert found.region_error == found.collective_error == 0
    assert len(found.regions) == 8
    assert len(found.collectives) == sum(
        s.num_all_gathers + s.num_reduce_scatters for s in plan.schedules
    )


def test_errors_are_shares_of_what_was_measured():
    plan = planned(layers(4, gather_us=150.0))
    found = plan.compare(as_predicted(plan, compute=2.0, comm=4.0))
    assert {row.us.error for row in found.regions} == {-0.5}
    assert {row.us.error for row in found.collectives} == {-0.75}
    assert found.region_error == 0.5


def test_finer_stretches_add_up_to_a_region_and_unseen_collectives_are_left_out():
    plan = planned(layers(1))
    forward = []
    for block_range in as_predicted(plan).forward:
        if block_range.step.kind is StepKind.COMPUTE:
            blocks = ((0, 0), (0, 1))
            forward += [
                Segment(replace(block_range.step, start=a, stop=b), 20.0 + b) for a, b in blocks
            ]
        else:
            forward.append(replace(block_range, comm_us=None))
    found = plan.compare(measured(1, tuple(forward), as_predicted(plan).backward))
    assert found.regions[0].us.measured_us == 21.0
    assert [row for row in found.collectives if row.direction is Direction.FORWARD] == []


def test_times_of_another_graph_are_refused():
    plan, other = planned(layers(2)), planned(layers(3))
    with pytest.raises(ValueError, match="not times of this graph: nothing ends at ops 2 to 3"):
        other.compare(as_predicted(plan))
    with pytest.raises(ValueError, match="no forecasts of its steps"):
        two_layers().compare(as_predicted(plan))


def test_the_table_has_a_line_for_each():
    plan = planned(layers(2))
    text = comparison_text(plan, plan.compare(as_predicted(plan, compute=2.0)))
    assert max(map(len, text.splitlines())) <= 92
    assert "4 regions, median error 50.0%" in text
    assert "forward, ops 0 to 0" in text
    assert "backward, reduce-scatter layers.0" in text
    assert " 100.0         200.0    -50.0%" in text
