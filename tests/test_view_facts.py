"""The facts behind a page's answers: names of ranges, what adds up, what more memory would buy."""

import json
from dataclasses import replace

import pytest
from pictures import GIB, every_plan, llama, planned

from graphshard.planner.plan_step import plan_step
from graphshard.planner.room import MORE_BYTES, with_room
from graphshard.schedule.plan import LeftOut, Plan
from graphshard.schedule.reasons import Bound, Gain, NotEarlier
from graphshard.view.answer import answer_sentences, standing_of
from graphshard.view.captured import captured_text, outside_of
from graphshard.view.lanes import lane_rows
from graphshard.view.misses import misses
from graphshard.view.outlook import prospects
from graphshard.view.ranges import groups_text, short_text
from graphshard.view.sheet import sheet_of
from graphshard.view.waits import longest_waits
from graphshard.view.waterfall import waterfall

PLANS = every_plan()
LLAMA = PLANS["llama"]


@pytest.mark.parametrize(
    ("names", "whole", "short"),
    [
        (["layers.3"], "layers.3", "layers.3"),
        (["layers.3", "layers.4"], "layers.3 + layers.4", "layers.3 + layers.4"),
        ([f"layers.{n}" for n in range(3, 14)], "layers.3 to layers.13 (11)", "layers.3-13"),
        ([f"layers.{n}" for n in (5, 4, 3)], "layers.5 to layers.3 (3)", "layers.5-3"),
        (["(root)", "a.0", "a.1", "a.2"], "(root) + a.0 to a.2 (3)", "(root) + a.0-2"),
        (["a.0", "a.1", "a.3", "b.4"], "a.0 + a.1 + a.3 + b.4", "a.0 + a.1 + a.3 + b.4"),
        (["a.1.x.0", "a.2.x.0", "a.3.x.0"], "a.1.x.0 to a.3.x.0 (3)", "a.1.x.0-3"),
        (["a.1.x.0", "a.2.x.1", "a.3.x.2"], *["a.1.x.0 + a.2.x.1 + a.3.x.2"] * 2),
        ([], "", ""),
    ],
)
def test_names_that_count_on_are_a_range(names, whole, short):
    assert groups_text(names) == whole
    assert short_text(names) == short


def test_the_waterfall_adds_up():
    bars = waterfall(LLAMA)
    gains = [reason for reason in LLAMA.reasons if isinstance(reason, Gain)]
    assert len(bars) == len(gains) + 2
    for bar, gain in zip(bars[1:-1], gains, strict=True):
        assert bar.way == ("better" if gain.gain_us > 0 else "worse" if gain.gain_us else "same")
        assert bar.time.startswith({"better": "-", "worse": "+", "same": ""}[bar.way])
    change = sum(b.width * (1 if b.way == "worse" else -1) for b in bars[1:-1] if b.width > 4)
    assert bars[0].width + change == pytest.approx(bars[-1].width, abs=4 * len(gains))
    assert waterfall(PLANS["no costs"]) == []


def test_the_parts_of_a_measured_step_add_up():
    found = misses(sheet_of(LLAMA, LLAMA.measured))
    *_, whole = found
    assert whole.name == "forward and backward"
    assert whole.way == "worse"
    assert {row.way for row in found if row.change.startswith("-")} <= {"better"}
    assert any(row.name.startswith("compute in") for row in found)
    assert misses(sheet_of(PLANS["merged"])) == []


def test_the_longest_waits_are_those_of_the_plan():
    sheet = sheet_of(LLAMA)
    lanes = lane_rows(sheet)
    waits = longest_waits(sheet, lanes)
    marks = [lanes[0].marks[wait.place] for wait in waits]
    lengths = [mark.end - mark.start for mark in marks]
    every = sorted((m.end - m.start for m in lanes[0].marks if m.kind == "wait"), reverse=True)
    assert lengths == pytest.approx(every[:5])
    assert all(wait.why for wait in waits)


def test_a_part_of_a_split_group_has_the_reason_of_its_own_wait():
    plan = PLANS["split"]
    sheet = sheet_of(plan)
    found = next(c for c in sheet.collectives if c.step.params)
    key = found.step.groups[0], found.direction, found.step.kind
    one, other = (
        NotEarlier(*key, Bound.FIRST, exposed_us=found.exposed_us),
        NotEarlier(*key, Bound.NO_NEED, exposed_us=found.exposed_us + 9),
    )
    for reasons in ((one, other), (other, one)):
        card = lane_rows(sheet_of(replace(plan, reasons=reasons)))
        marks = [m for row in card for m in row.marks if m.start == found.start]
        texts = [dict(m.card)["why then"] for m in marks if "why then" in dict(m.card)]
        assert texts
        assert all("issued first of all" in text for text in texts)


def test_what_limits_a_step_is_what_compute_waits_for_most():
    standing = standing_of(LLAMA)
    assert standing.limit is not None
    assert (str(standing.limit.lane), str(standing.limit.direction)) == ("all_gather", "forward")
    assert standing.spare_bytes == 40 * GIB - LLAMA.estimate.peak_bytes
    assert standing.more_bytes == LLAMA.estimate.peak_bytes - LLAMA.estimate.fsdp2.peak_bytes
    assert answer_sentences(PLANS["no costs"]) == []


# -- what more memory would buy ------------------------------------------------------------------


BUDGET = 12 * GIB


def test_more_room_is_planned_anew_and_is_never_a_loss():
    problem = llama(12, budget_bytes=BUDGET)
    estimate = plan_step(problem).estimate
    rungs = with_room(estimate, problem).room
    assert [rung.budget_bytes - BUDGET for rung in rungs] == list(MORE_BYTES)
    for rung in rungs:
        again = plan_step(replace(problem, budget_bytes=rung.budget_bytes)).estimate
        assert rung.step_time_us == min(again.step_time_us, estimate.step_time_us)
        assert rung.peak_bytes <= rung.budget_bytes
    assert rungs[-1].step_time_us < estimate.step_time_us
    plan = replace(planned(problem, "12 blocks"), estimate=replace(estimate, room=rungs))
    first, second, *_ = prospects(plan)
    assert (first.what, second.what) == ("1.0 GiB more memory", "10.0 GiB more memory")
    assert second.gain.startswith("-")
    assert second.way == "better"
    assert [one.is_best for one in (first, second)].count(True) == 1


def test_where_nothing_is_left_nothing_is_planned_anew():
    found = plan_step(llama(4, budget_bytes=100 * GIB)).estimate
    best = replace(found, lower_bound_us=found.step_time_us)
    rungs = with_room(best, None).room  # a problem would be planned
    assert {rung.step_time_us for rung in rungs} == {found.step_time_us}


# -- what is captured ----------------------------------------------------------------------------


def test_what_a_graph_leaves_out_is_said():
    plan = PLANS["merged"]
    count = len(plan.groups)
    assert captured_text(plan) == ""
    assert (
        captured_text(replace(plan, left_out=()))
        == f"One graph runs all {len(plan.groups)} groups."
    )
    names = [f"tower.{n}" for n in range(4)]
    left = (*(LeftOut(name, "it calls print") for name in names), LeftOut("head"))
    part = replace(plan, left_out=left)
    assert captured_text(part) == f"This graph runs {count} of {count + 5} groups."
    eager, other = outside_of(part)
    assert (eager.names, eager.why) == (
        "tower.0 to tower.3 (4)",
        "eager FSDP2 runs them: it calls print",
    )
    assert other.names == "head"


def test_new_fields_are_kept_in_a_file_and_missing_ones_are_not_missed():
    problem = llama(4)
    bare = planned(problem, "4 blocks")
    plan = replace(bare, estimate=with_room(bare.estimate, problem), left_out=(LeftOut("x", "y"),))
    assert Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    del data["left_out"], data["estimate"]["room"]
    assert Plan.from_data(data) == bare
