"""From a plan with costs to the marks of each view: every number is the plan's own."""

from dataclasses import replace

import pytest
from pictures import every_plan, llama, planned
from planning import random_problem

from graphshard.schedule.plan import Direction, Lane, StepKind
from graphshard.view.axis import axis_of
from graphshard.view.courses import course_rows
from graphshard.view.groups import table_of
from graphshard.view.headline import Beside, headline
from graphshard.view.lanes import lane_rows
from graphshard.view.marks import AxisMark, MarkRow, Words, packed
from graphshard.view.memory import byte_ticks, memory_of
from graphshard.view.residency import residency_rows
from graphshard.view.sheet import sheet_of
from graphshard.view.text import bytes_text
from graphshard.view.units import change_text, rate_text, time_text

PLANS = every_plan()
PRICED = {name: plan for name, plan in PLANS.items() if plan.forecasts}
PRICED |= {
    f"random {seed}": planned(replace(random_problem(seed, micro=False), budget_bytes=None), "r")
    for seed in range(8)
}


@pytest.fixture(params=PRICED.values(), ids=PRICED.keys())
def sheet(request):
    return sheet_of(request.param, request.param.measured)


def total(marks, *kinds):
    return sum(mark.end - mark.start for mark in marks if mark.kind in kinds)


def test_the_waits_add_up_to_the_exposed_time(sheet):
    compute = lane_rows(sheet)[0]
    exposed_us = sum(f.exposed_us for f in sheet.plan.forecasts)
    assert total(compute.marks, "wait") == pytest.approx(exposed_us)
    work_us = sum(t.work_us for f in sheet.plan.forecasts for t in f.steps)
    assert total(compute.marks, "forward", "backward", "copy") == pytest.approx(work_us)
    assert max(mark.end for mark in compute.marks) == pytest.approx(sheet.axis.end)


def test_every_collective_is_on_the_lane_of_its_process_group(sheet):
    rows = lane_rows(sheet)[1:]
    times = [c for f in sheet.plan.forecasts for c in f.collectives]
    assert len(rows) == len({c.lane for c in times})
    assert sum(len(row.marks) for row in rows) == len(times)
    for lane, row in zip(sorted({c.lane for c in times}), rows, strict=True):
        busy_us = sum(c.us for c in times if c.lane == lane)
        assert total(row.marks, "gather", "reduce") == pytest.approx(busy_us)


def test_a_collective_is_exposed_or_has_slack(sheet):
    for found in sheet.collectives:
        assert found.wait is not None
        assert found.exposed_us == 0 or found.slack_us == 0
        assert found.exposed_us > 0 or found.end <= sheet.axis.reached[found.wait] + 1e-6


def test_the_table_says_the_same_as_the_lanes(sheet):
    table = table_of(sheet)
    columns = {title: place for place, title in enumerate(table.titles)}
    assert [line.group for line in table.lines] == [g.id for g in sheet.plan.groups]

    def column(title):
        return sum(line.cells[columns[title]].key for line in table.lines)

    gathers = [c for c in sheet.collectives if c.step.lane is Lane.ALL_GATHER]
    assert column("all-gathers") == pytest.approx(sum(c.end - c.start for c in gathers))
    exposed_us = sum(f.exposed_us for f in sheet.plan.forecasts)
    assert column("exposed") == pytest.approx(exposed_us)
    marks = [mark for row in residency_rows(sheet) for mark in row.marks]
    assert column("gathered for") == pytest.approx(total(marks, "held", "kept"))


def test_kept_groups_are_those_that_the_schedule_keeps(sheet):
    kept = {step.group for step in sheet.plan.forward.of_kind(StepKind.RELEASE) if step.kept}
    rows = residency_rows(sheet)
    marks = [mark for row in rows for mark in row.marks if mark.kind == "kept"]
    assert {mark.groups[0] for mark in marks} == kept
    if sheet.plan.backward is not None:
        assert all(mark.end >= sheet.axis.divider for mark in marks)


def test_memory_adds_up_and_the_peak_is_the_estimates(sheet):
    memory = memory_of(sheet)
    alive = [0] * len(sheet.rows.steps)
    for layer in memory.layers:
        steps = [step for step, _ in layer.changes]
        for (step, size), stop in zip(layer.changes, [*steps[1:], len(alive)], strict=True):
            for index in range(step, stop):
                alive[index] += size
    assert tuple(alive) == sheet.alive_bytes
    if sheet.plan.estimate.ours.peak_bytes == max(alive):
        assert memory.peak_bytes == max(alive)
        assert memory.peak.title == f"peak {bytes_text(max(alive))}"
    assert memory.ticks[-1][0] >= memory.peak_bytes


def test_owners_of_the_peak_are_ranked_and_counted():
    sheet = sheet_of(PLANS["llama"])
    memory = memory_of(sheet)
    owners = sheet.plan.estimate.ours.peak_owners
    (_, where), *rows = memory.peak.card
    assert where.startswith(time_text(sheet.axis.begun[memory.peak_step]))
    assert rows[0] == (str(owners[0].category), bytes_text(owners[0].bytes))
    named, size = next(row for row in rows if row[0].startswith("Unsharded Param"))
    held = [o for o in owners if str(o.category) == "Unsharded Param"]
    assert len({o.bytes for o in held}) == 1
    assert size == f"{bytes_text(sum(o.bytes for o in held))} ({bytes_text(held[0].bytes)} each)"
    assert "layers." in named


def test_a_far_budget_is_not_in_the_picture():
    plan = planned(llama(4, budget_bytes=2**50), "far")
    memory = memory_of(sheet_of(plan))
    assert memory.budget_bytes is None
    assert memory.ticks[-1][0] < 2**40
    assert Beside("budget", "1,024.0 TiB") in headline(sheet_of(plan))[2].beside


def test_other_courses_are_as_long_as_what_they_show(sheet):
    compute = {row.course: row.marks for row in course_rows(sheet) if row.name == "compute"}
    course = sheet.plan.fsdp2
    theirs = axis_of(course.schedules, course.forecasts)
    assert max(m.end for m in compute["FSDP2, predicted"]) == pytest.approx(theirs.end)
    exposed_us = sum(f.exposed_us for f in course.forecasts)
    assert total(compute["FSDP2, predicted"], "wait") == pytest.approx(exposed_us)
    assert ("graphshard, measured" in compute) == (sheet.measured is not None)
    if sheet.measured is not None:
        ends = [mark.end for mark in compute["graphshard, measured"]]
        assert max(ends) >= sheet.measured.step_time_us * (1 - 1e-6)


def test_every_collective_of_the_other_courses_is_drawn(sheet):
    marks = [m for row in course_rows(sheet) if row.name != "compute" for m in row.marks]
    theirs = [c for f in sheet.plan.fsdp2.forecasts for c in f.collectives]
    fsdp2 = [m for m in marks if m.title.startswith("FSDP2")]
    assert sum(m.end - m.start for m in fsdp2) == pytest.approx(sum(c.us for c in theirs))


def test_measured_times_are_on_the_cards_of_regions_and_collectives():
    plan = PLANS["llama"]
    sheet = sheet_of(plan, plan.measured)
    compute, gathers, _ = lane_rows(sheet)
    for row, factor, kinds in ((compute, 1.06, ("forward", "backward")), (gathers, 1.2, "gather")):
        for mark in row.marks:
            if mark.kind in kinds:
                took_us = mark.end - mark.start
                assert dict(mark.card)["measured"] == time_text(took_us * factor)


def test_the_card_of_a_collective_says_everything():
    sheet = sheet_of(PLANS["llama"])
    gather = lane_rows(sheet)[1].marks[0]
    assert gather.title == "forward all-gather, layers.0"
    card = dict(gather.card)
    assert card["bytes"] == "436.0 MiB"
    assert (card["dtype"], card["ranks"]) == ("bfloat16", "8")
    assert (card["start"], card["duration"]) == ("0 us", "11.5 ms")
    assert card["exposed"] == "11.5 ms: compute waits so long"
    # 7/8 of 436 MiB in 11.5 ms
    assert card["received at"] == "34.8 GB/s"
    assert card["memory then"].endswith("GiB")
    assert "with no compute before it to hide it" in card["why then"]
    assert card["resharded"].startswith(
        "kept, it would save 11.5 ms of gathers, and hold 436.0 MiB"
    )


def test_merged_and_split_gathers_name_what_they_carry():
    merged = [m for m in lane_rows(sheet_of(PLANS["merged"]))[1].marks if len(m.groups) > 1]
    assert merged
    for mark in merged:
        card = dict(mark.card)
        assert card["why together"].startswith(f"one collective carries {len(mark.groups)} groups")
    split = sheet_of(PLANS["split"])
    parts = [c for c in split.collectives if c.step.params]
    assert parts
    sizes = {c.entry.size_bytes for c in parts}
    assert max(sizes) < max(g.gathered_bytes for g in split.plan.groups)


def test_a_plan_without_backward_has_no_divider_and_no_reductions():
    sheet = sheet_of(PLANS["inference"])
    assert sheet.axis.divider is None
    assert [row.name for row in lane_rows(sheet)] == ["compute", "all-gather"]


def test_one_lane_for_both_kinds_says_so():
    names = [row.name for row in lane_rows(sheet_of(PLANS["one lane"]))]
    assert names == ["compute", "all-gather + reduce-scatter"]


def test_without_costs_everything_is_in_program_order():
    sheet = sheet_of(PLANS["no costs"])
    assert (sheet.axis.timed, sheet.axis.end) == (False, pytest.approx(1))
    compute, gathers, reductions = lane_rows(sheet)
    assert [m.label for m in compute.marks] == ["layers.0", "layers.1", "layers.1", "layers.0"]
    assert [(m.kind, m.groups) for m in gathers.marks] == [
        ("gather", (0,)), ("gather", (1,)), ("gather", (0,)), ("kept", (1,)),
    ]  # fmt: skip
    assert [m.row for m in reductions.marks] == [0, 1]
    assert course_rows(sheet) == []
    assert table_of(sheet).titles == ("parameters", "gathered", "after forward", "because")
    assert headline(sheet)[0].name == "step"
    memory = memory_of(sheet)
    assert [layer.name for layer in memory.layers] == ["Unsharded Param"]
    assert memory.peak.title == "peak 200 B gathered"
    assert dict(memory.peak.card)["Unsharded Param, layers.0"] == "100 B"


def test_forecasts_without_memory_leave_the_gathered_parameters():
    plan = PLANS["merged"]
    bare = replace(plan, forecasts=tuple(replace(f, memory=()) for f in plan.forecasts))
    sheet = sheet_of(bare)
    assert (sheet.axis.timed, sheet.alive_bytes) == (True, sheet.rows.gathered_bytes)
    memory = memory_of(sheet)
    assert (memory.rival, [layer.kind for layer in memory.layers]) == ((), ["held"])
    assert "gathered then" in dict(lane_rows(sheet)[1].marks[0].card)


def test_a_direction_that_holds_nothing_stands_beside_one_that_does():
    plan = PLANS["merged"]
    forward, backward = plan.forecasts
    sheet = sheet_of(replace(plan, forecasts=(forward, replace(backward, memory=()))))
    assert sheet.alive_bytes == (*forward.alive_bytes, *(0 for _ in backward.steps))
    assert lane_rows(sheet)
    assert memory_of(sheet).rival == memory_of(sheet_of(plan)).rival


def test_an_empty_plan_has_empty_views():
    sheet = sheet_of(PLANS["empty"])
    assert [row.marks for row in lane_rows(sheet)] == [()]
    assert memory_of(sheet).peak is None


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0 us"), (0.0004, "0 us"), (0.25, "0.25 us"), (84.04, "84.0 us"), (999.4, "999 us"),
        (999.6, "1.00 ms"), (12_340, "12.3 ms"), (7_610_000, "7.61 s"), (1.2e9, "1,200 s"),
    ],
)  # fmt: skip
def test_time_text(us, text):
    assert time_text(us) == text


def test_other_units():
    assert rate_text(2e9, 1e6) == "2 GB/s"
    assert rate_text(2e5, 1e6) == "0.2 MB/s"
    assert (change_text(90, 100), change_text(1, 0)) == ("-10.0 %", "")
    assert [text for _, text in byte_ticks(2**30)] == [
        "0", "256.0 MiB", "512.0 MiB", "768.0 MiB", "1.0 GiB",
    ]  # fmt: skip


def test_packed_marks_share_their_words():
    words = Words()
    marks = tuple(AxisMark("held", i, i + 0.12345, "x", (("size", "1 B"),), (i,)) for i in range(2))
    (row,) = packed([MarkRow("layers.0", marks)], words, 3)
    assert sorted(words.texts) == ["", "0", "1", "1 B", "held", "size", "x"]
    assert [mark[1:4] for mark in row["marks"]] == [[0, 0.123, 0], [1, 1.123, 0]]
    assert [words.texts[mark[4]] for mark in row["marks"]] == ["0", "1"]
    first, second = ([mark[0], *mark[5:]] for mark in row["marks"])
    assert first == second
    assert [words.texts[number] for number in first] == ["held", "", "x", "size", "1 B"]


def test_directions_have_the_words_of_their_kind():
    kinds = {m.kind for m in lane_rows(sheet_of(PLANS["llama"]))[0].marks}
    assert kinds == {*map(str, Direction), "wait"}
