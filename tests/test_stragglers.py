"""How long ranks wait for the slowest of them: its expectation, in plans and on screens."""

import json
from dataclasses import replace

import numpy as np
import pytest
from forecasts import planned
from hypothesis import given
from hypothesis import strategies as st
from planning import layers

from graphshard.cost.machine_text import from_text, to_text
from graphshard.cost.presets import preset, preset_names
from graphshard.cost.stragglers import expected_max, slowest, with_stragglers
from graphshard.schedule.plan import Plan, StepKind
from graphshard.view.offline import Effort, plan_text

# Known in closed form; from 6 on from tables (H. L. Harter, Biometrika 48, 1961, table 1).
EXACT = {
    1: 0.0,
    2: 1 / np.sqrt(np.pi),
    3: 1.5 / np.sqrt(np.pi),
    6: 1.26721,
    10: 1.53875,
    100: 2.50759,
}


@pytest.mark.parametrize("count", EXACT)
def test_the_largest_of_a_few_normals_is_known(count):
    assert expected_max(count) == pytest.approx(EXACT[count], abs=5e-6)


@pytest.mark.parametrize("count", [4, 64, 512, 2_048])
def test_the_largest_of_many_is_that_of_simulated_ones(count):
    draws = 4_000
    found = np.random.default_rng(count).standard_normal((draws, count)).max(axis=1)
    error = found.std() / np.sqrt(draws)
    assert abs(expected_max(count) - found.mean()) < 5 * error
    assert error < 0.02


@given(st.integers(1, 2**24))
def test_more_ranks_have_a_slower_one_at_most_by_a_little(count):
    one, more = expected_max(count), expected_max(count + 1)
    assert one < more + 1e-12
    # The square root of 2 ln n bounds the expectation (a normal's moment generating function).
    assert one <= np.sqrt(2 * np.log(count)) + 1e-9


def test_the_slowest_is_as_much_slower_as_ranks_differ():
    assert slowest(0.0, 512) == 1
    assert slowest(0.02, 1) == pytest.approx(1)
    assert slowest(0.02, 512) - 1 == pytest.approx(2 * (slowest(0.01, 512) - 1))


# -- in plans ------------------------------------------------------------------------------

MACHINE = replace(preset("h100"), compute_spread=0.02)


def compute_us(plan):
    pairs = zip(plan.schedules, plan.forecasts, strict=True)
    return sum(
        time.work_us
        for schedule, forecast in pairs
        for step, time in zip(schedule.steps, forecast.steps, strict=True)
        if step.kind is StepKind.COMPUTE
    )


def late_us(plan, ranks=64, machine=MACHINE):
    return with_stragglers(plan, machine, ranks).estimate.stragglers.ours_us


def test_a_step_of_compute_alone_is_longer_by_its_slowest_rank():
    plan = planned(layers(3, compute_us=1e6))
    expected = compute_us(plan) * 0.02 * expected_max(64)
    assert late_us(plan) == pytest.approx(expected, rel=1e-6)


def test_waiting_for_the_network_hides_a_slow_rank():
    """Where communication takes most of the time, compute has room to be slow."""
    plan = planned(layers(8, gather_us=400.0, reduce_us=400.0))
    whole_us = compute_us(plan) * 0.02 * expected_max(64)
    assert 0 < late_us(plan) < 0.7 * whole_us


def test_all_figures_but_the_stragglers_stay():
    plan = planned(layers(3))
    late = with_stragglers(plan, MACHINE, 64)
    assert replace(late, estimate=replace(late.estimate, stragglers=None)) == plan
    assert with_stragglers(late, MACHINE, 64) == late
    found = late.estimate.stragglers
    assert (found.ranks, found.spread) == (64, 0.02)
    assert late_us(plan, 512) > late_us(plan, 64) > 0


def test_where_ranks_are_alike_there_are_none():
    plan = planned(layers(3))
    assert with_stragglers(plan, replace(MACHINE, compute_spread=0.0), 64) == plan
    assert with_stragglers(plan, MACHINE, 1) == plan


def test_a_plan_file_has_them():
    late = with_stragglers(planned(layers(3)), MACHINE, 64)
    assert Plan.from_json(late.to_json()) == late
    data = json.loads(late.to_json())
    del data["estimate"]["stragglers"]
    assert Plan.from_json(json.dumps(data)).estimate.stragglers is None
    assert late.summary().stragglers.ranks == 64


def test_every_gpu_has_a_spread():
    assert {preset(n).compute_spread for n in preset_names() if n != "cpu"} == {0.015}
    assert preset("cpu").compute_spread == 0
    assert from_text(to_text(MACHINE)) == MACHINE


def test_the_screen_says_how_much_longer_the_step_is():
    late = with_stragglers(planned(layers(3)), MACHINE, 512)
    estimate = late.estimate
    text = plan_text(late, "here", Effort(1, 1, 0, 1, 0.0, 0.0, 0.0), "there")
    (row,) = [line for line in text.splitlines() if line.startswith("  with stragglers ")]
    assert row.endswith("   at 512 ranks")
    whole = estimate.whole_step_us + estimate.stragglers.ours_us
    assert f"{whole / 1e3:,.3f} ms" in row
    assert "stragglers" not in plan_text(planned(layers(3)), "", Effort(1, 1, 0, 1, 0, 0, 0), "")
