"""The facts behind a page's answers: names of ranges, what adds up, what more memory would buy."""

import json
from dataclasses import replace

import pytest
from pictures import GIB, every_plan, llama, planned

from graphshard.planner import room
from graphshard.planner.plan_step import plan_step
from graphshard.planner.room import MORE_BYTES, with_room
from graphshard.schedule.estimate import OptimizerKind, OptimizerStep, Spent
from graphshard.schedule.plan import Category, LeftOut, Plan, PricedOn
from graphshard.schedule.reasons import Bound, Gain, Hold, NotEarlier
from graphshard.view.answer import answer_sentences, standing_of
from graphshard.view.brief import Rest
from graphshard.view.captured import captured_text, outside_of
from graphshard.view.courses import course_rows
from graphshard.view.lanes import lane_rows
from graphshard.view.memory import peak_place
from graphshard.view.misses import Miss, misses
from graphshard.view.outlook import prospects
from graphshard.view.ranges import groups_text, short_text
from graphshard.view.reasons import reason_text
from graphshard.view.sheet import sheet_of
from graphshard.view.summary import summary_lines
from graphshard.view.text import bytes_text
from graphshard.view.timeline import computing_groups
from graphshard.view.units import share_text, time_text
from graphshard.view.waits import kind_text, longest_waits, waited, waited_text
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
        assert all("at the very start" in text for text in texts)


def test_what_limits_a_step_is_what_compute_waits_for_most():
    standing = standing_of(LLAMA)
    first = standing.limits[0]
    assert (str(first.lane), str(first.direction)) == ("all_gather", "forward")
    assert standing.rest == Rest(40 * GIB - LLAMA.estimate.peak_bytes, 0.0)
    assert standing.more_bytes == LLAMA.estimate.peak_bytes - LLAMA.estimate.fsdp2.peak_bytes
    assert answer_sentences(PLANS["no costs"]) == []


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.forecasts])
def test_all_waits_of_a_kind_are_told_beside_the_longest_single_ones(name):
    plan = PLANS[name]
    sheet = sheet_of(plan)
    every = waited(plan)
    assert sum(one.us for one in every) == pytest.approx(sum(f.exposed_us for f in plan.forecasts))
    assert sum(one.count for one in every) == sum(c.exposed_us > 0 for c in sheet.collectives)
    limits = standing_of(plan).limits
    assert list(limits) == every[: len(limits)]
    text = answer_sentences(plan)[1]
    assert text.startswith("Limited by communication" if limits else "Limited by compute: ")
    assert all(f"{time_text(one.us)} for {kind_text(one)}" in text for one in limits)
    assert all(f"for {kind_text(one)}" in waited_text(plan) for one in every)


def test_shares_of_waits_are_of_the_whole_step():
    """With the optimizer, as those of the first sentences."""
    plan = planned(replace(llama(4), optimizer=OptimizerStep(OptimizerKind.ADAMW, False, 5e5)), "4")
    sheet = sheet_of(plan)
    longest = max(c.exposed_us for c in sheet.collectives)
    found = longest_waits(sheet, lane_rows(sheet))[0]
    assert found.share == share_text(longest, plan.estimate.whole_step_us)


def test_what_is_left_of_the_limit_is_told_in_one_way():
    """The rest of a limit may bring something: `all_spent` has it, here as on the screens."""
    estimate = LLAMA.estimate
    more = Spent(estimate.step_time_us - 0.01 * estimate.whole_step_us, 39 * GIB)
    plan = replace(LLAMA, estimate=replace(estimate, all_spent=more))
    assert "the other 4.6 GiB would bring 1.0 %" in answer_sentences(plan)[2]
    assert "the other 4.6 GiB would bring 1.0 %" in summary_lines(plan)
    assert "the other 4.6 GiB would bring nothing" in answer_sentences(LLAMA)[2]
    close = replace(estimate, budget_bytes=estimate.peak_bytes + GIB // 4, all_spent=None)
    assert "enough" not in answer_sentences(replace(LLAMA, estimate=close))[2]


def test_a_page_says_whether_its_plan_was_measured():
    assert answer_sentences(LLAMA)[-1] == "Not measured yet: all figures are predicted."
    found = answer_sentences(LLAMA, LLAMA.measured)[-1]
    change = LLAMA.measured.step_time_us / LLAMA.estimate.step_time_us - 1
    assert f", {share_text(change, 1.0)} more than the " in found
    shorter = Miss("parts that overlap", "0 us", "-9 ms", "-9.00 ms", "better")
    longer = Miss("compute in forward", "1 ms", "3 ms", "+2.00 ms", "worse")
    whole = Miss("forward and backward", "1 ms", "2 ms", "+1.00 ms", "worse")
    found = answer_sentences(LLAMA, LLAMA.measured, [shorter, longer, whole])[-1]
    assert found.endswith("; the largest part: compute in forward, +2.00 ms.")
    same = replace(LLAMA.measured, step_time_us=LLAMA.estimate.step_time_us)
    assert answer_sentences(LLAMA, same)[-1].endswith(", as predicted.")


def test_measured_waits_add_up_to_the_exposed_time_of_a_step():
    """Of a wait that two steps of five have the median is 0; whole steps waited all the same."""
    quiet = tuple(replace(s, exposed_us=0.0) for s in LLAMA.measured.forward)
    found = replace(LLAMA.measured, forward=quiet)
    sheet = sheet_of(LLAMA, found)
    rows = {row.name: row for row in misses(sheet)}
    varying = rows["waits that differ from step to step"]
    parts_us = sum(s.exposed_us for s in (*found.forward, *found.backward))
    assert varying.measured == time_text(found.exposed_us - parts_us)
    assert rows["waits in forward"].measured == "0 us"
    assert "not attributed" not in rows, "those waits are all that was not attributed"
    unknown = next(m for row in course_rows(sheet) for m in row.marks if m.kind == "unknown")
    assert dict(unknown.card)["of it"] == f"{varying.measured} of {varying.name}"
    assert all(row.meaning for name, row in rows.items() if name != "forward and backward")


def test_what_a_group_would_do_if_it_were_kept_is_told_as_that():
    kept = Hold(0, True, 7e3, 2e6, 4 * GIB)
    assert (
        reason_text(kept, {0: "a"})
        == "saves 7.00 ms of gathers, holds 4.0 GiB for 2.00 s of compute"
    )
    assert reason_text(replace(kept, is_kept=False), {0: "a"}) == (
        "kept, it would save 7.00 ms of gathers, and hold 4.0 GiB for 2.00 s of compute"
    )
    at_once = replace(kept, held_us=0.0)
    assert reason_text(at_once, {0: "a"}) == "saves 7.00 ms of gathers, backward begins with it"


def test_between_two_layers_the_peak_has_the_name_of_the_one_before():
    sheet = sheet_of(LLAMA)
    steps = sheet.rows.steps
    owners = computing_groups(steps)
    backward = next(i for i in range(len(steps)) if str(sheet.rows.direction_of(i)) == "backward")
    between = [i for i in range(backward, len(steps)) if owners[i] is None and owners[i - 1]]
    at = between[1]
    assert peak_place(sheet, at) == f"backward right after {sheet.names[owners[at - 1]]}"


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


def test_no_memory_is_spent_for_less_than_it_is_worth():
    """The plan of before stays where a larger budget gains less than `thrift`: its peak, too."""
    problem = llama(12, budget_bytes=BUDGET)
    estimate = plan_step(problem).estimate
    best_us = with_room(estimate, problem).room[-1].step_time_us
    gain = estimate.step_time_us / best_us - 1
    assert gain > 0
    for thrift, is_taken in ((0.9 * gain, True), (1.1 * gain, False)):
        rung = with_room(estimate, replace(problem, thrift=thrift)).room[-1]
        assert (rung.step_time_us < estimate.step_time_us) is is_taken
        assert (rung.peak_bytes > estimate.peak_bytes) is is_taken
    plan = replace(planned(problem, "12 blocks"), estimate=replace(estimate, room=(rung,)))
    found = prospects(plan)[0]
    assert (found.gain, found.peak) == ("nothing worth it", bytes_text(estimate.peak_bytes))


def test_what_was_not_planned_is_said():
    found = prospects(planned(llama(4), "4 blocks"))[0]
    assert (found.what, found.step, found.peak) == ("more memory", "", "")
    assert found.gain.startswith("at most ")
    assert "graphshard.explain(model)" in found.note


def preset(budget_bytes):
    plan = planned(llama(12, budget_bytes=budget_bytes), "12 blocks")
    return replace(plan, priced_on=PricedOn("h100-ib400", 8))


def test_a_batch_that_is_over_the_limit_has_a_sign_and_words():
    tight, wide = (
        next(one for one in prospects(preset(budget)) if one.what.startswith("twice the batch"))
        for budget in (BUDGET, 100 * GIB)
    )
    assert tight.is_over
    assert f"takes {tight.peak}, over today's budget of 12.0 GiB" in tight.note
    assert "; FSDP2's own schedule would take " in tight.note
    assert tight.note.endswith("; the device has 79.1 GiB")
    assert (wide.is_over, wide.note) == (False, "")


def test_a_batch_that_the_device_has_no_room_for_is_not_the_best_to_do():
    plan = preset(40 * GIB)
    huge = replace(plan.estimate.ours, peak_by_category=((Category.ACTIVATION, 60 * GIB),))
    found = prospects(replace(plan, estimate=replace(plan.estimate, ours=huge)))
    twice = next(one for one in found if one.what.startswith("twice the batch"))
    assert (twice.peak, twice.is_over, twice.is_best) == ("120.0 GiB", True, False)
    assert any(one.is_best for one in prospects(plan) if one.what.startswith("twice the batch"))


def test_where_nothing_is_left_nothing_is_planned_anew(monkeypatch):
    problem = llama(4, budget_bytes=100 * GIB)
    found = plan_step(problem).estimate
    best = replace(found, lower_bound_us=found.step_time_us)
    monkeypatch.setattr(room, "plan_best", None)  # none is called
    rungs = with_room(best, problem).room
    assert {rung.step_time_us for rung in rungs} == {found.step_time_us}


# -- what is captured ----------------------------------------------------------------------------


def test_what_a_graph_leaves_out_is_said():
    plan = PLANS["merged"]
    count = len(plan.groups)
    assert captured_text(plan).startswith("This file does not say whether")
    whole = f"Captured completely: one graph runs all {len(plan.groups)} groups."
    assert captured_text(replace(plan, left_out=())) == whole
    assert captured_text(PLANS["empty"]) == ""
    names = [f"tower.{n}" for n in range(4)]
    left = (*(LeftOut(name, "it calls print") for name in names), LeftOut("head"))
    part = replace(plan, left_out=left)
    assert (
        captured_text(part) == f"Captured in part: this graph runs {count} of {count + 5} groups."
    )
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
