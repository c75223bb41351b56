"""The plan as a value: its file format, residency and gathered bytes."""

import json
import re
from dataclasses import asdict, replace

import pytest
from forecasts import planned
from planning import layers
from plans import group, plan, two_layers

import graphshard
from graphshard.errors import FileError
from graphshard.schedule.estimate import Limit
from graphshard.schedule.plan import Lane, Plan, Step, StepKind
from graphshard.schedule.residency import Residency


def merge_of(group):
    launch = {"kind": "gather_issue", "direction": "forward", "launch_us": 1.0}
    return {"what": "merge", "group": group, **launch}


def test_json_round_trip():
    before = two_layers()
    assert Plan.from_json(before.to_json()) == before
    assert Plan.from_json(before.to_json(indent=None)) == before


def test_json_round_trip_without_backward():
    before = plan([group(0, "")], "issue 0, wait 0, compute 2, release 0")
    after = Plan.from_json(before.to_json())
    assert after == before
    assert after.backward is None


def test_json_is_plain_and_carries_its_schema():
    data = json.loads(two_layers().to_json())
    assert data["schema"] == 9
    assert data["forward"]["steps"][0]["kind"] == "gather_issue"
    assert data["groups"][1]["params"][0]["shape"] == [15, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "found 'list'"),
        ("3", "found 'int'"),
        ("{}", "found None"),
        ('{"schema": 99}', "found 99"),
        ('{"schema": 9}', "entry 'name' is missing"),
    ],
)
def test_from_json_names_what_is_wrong(text, message):
    with pytest.raises(FileError, match=f"GS1202: .*{message}"):
        Plan.from_json(text)


def step(data, place):
    return data["forward"]["steps"][place]


def broken(change):
    data = json.loads(two_layers().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("groups"), "entry 'groups' is missing"),
        (lambda d: d.update(forward=None), "forward: expected an object, found None"),
        (lambda d: d["groups"][0].update(color=1), r"groups\[0\]: unknown entry 'color'"),
        (lambda d: step(d, 0).update(kind="guess"), r"steps\[0\].kind: expected one of .*'guess'"),
        (lambda d: d["forward"].update(direction="sideways"), "direction: expected .*'sideways'"),
        (
            lambda d: d["forward"].update(direction="backward"),
            "forward.direction: expected forward",
        ),
        (lambda d: step(d, 1).update(group=7), r"forward.steps\[1\].group: there is no group 7"),
        (
            lambda d: step(d, 1).update(group=-1),
            r"steps\[1\].group: expected a whole number from 0",
        ),
        (lambda d: step(d, 1).update(group=True), r"steps\[1\].group: expected a whole number, f"),
        (lambda d: step(d, 1).update(group=None), r"forward.steps\[1\]: gather_wait is of a group"),
        (lambda d: step(d, 0).update(params=[1]), r"steps\[0\].params: parameter 1 of 1"),
        (lambda d: step(d, 0).update(with_groups=[0]), r"steps\[0\].with_groups: a group travels"),
        (lambda d: d["forward"]["steps"].pop(0), r"steps\[0\]: gather_wait .* before its issue"),
        (lambda d: d["forward"]["steps"].pop(1), r"forward.steps\[0\]: nothing waits for it"),
        (lambda d: step(d, 3).update(start=1), r"steps\[3\]: expected ops from 0 on, found 1 to 4"),
        (lambda d: d["groups"][1].update(id=0), r"groups\[1\].id: another group has the number 0"),
        (
            lambda d: d["groups"][0].update(world_size=0),
            r"world_size: expected a whole number from 1",
        ),
        (
            lambda d: d["groups"][0]["params"][0].update(shape=[2**70]),
            r"params\[0\].shape\[0\]: exp",
        ),
        (
            lambda d: d.update(reasons=[merge_of(9)]),
            r"reasons\[0\]: there is no group 9",
        ),
    ],
)
def test_from_json_refuses_a_broken_plan(change, message):
    with pytest.raises(FileError, match=f"GS1202: broken plan: .*{message}"):
        Plan.from_json(broken(change))


def test_residency_of_a_resharded_and_a_kept_group():
    # Forward has steps 0 to 7, backward steps 8 to 19.
    assert two_layers().residency() == (
        Residency(group=0, start=0, stop=4, kept=False),
        Residency(group=1, start=2, stop=12, kept=True),
        Residency(group=0, start=9, stop=16, kept=False),
    )


def test_residency_without_a_release_lasts_to_the_end():
    text = "issue 0, wait 0, compute 2"
    assert plan([group(0, "")], text).residency() == (Residency(0, 0, 2, kept=False),)


def test_gathered_bytes_count_the_bucket_at_the_wait():
    text = "compute 1, issue 0, wait 0, compute 2, release 0, compute 1"
    alive = plan([group(0, "a", 100)], text).gathered_bytes_by_step()
    assert alive == [0, 100, 200, 100, 100, 0]


def test_gathered_bytes_on_one_rank_need_no_bucket():
    one = group(0, "a", 100, world=1)
    assert plan([one], "issue 0, wait 0, release 0").gathered_bytes_by_step() == [100, 100, 100]


def test_gathered_bytes_of_a_kept_group_last_until_backward():
    alive = two_layers().gathered_bytes_by_step()
    a, b = 100, 60
    assert alive[:8] == [a, 2 * a, a + b, a + b, a + b, 2 * b, b, b]
    # The kept group's wait in backward copies nothing, so it counts once.
    assert alive[8:] == [b, a + b, a + b, a + b, a + b, a, 2 * a, a, a, 0, 0, 0]


def test_summary_counts_no_collective_for_a_kept_gather():
    summary = two_layers().summary()
    assert (summary.graphs, summary.groups, summary.params) == (2, 2, 2)
    assert (summary.all_gathers, summary.reduce_scatters, summary.all_reduces) == (3, 2, 0)
    assert (summary.collectives, summary.gathered_peak_bytes) == (5, 200)
    assert summary.fingerprint == two_layers().fingerprint


def test_summary_has_figures_and_those_of_fsdp2():
    own = planned(layers(4, gather_us=200.0, budget_bytes=20_000))
    summary, estimate = own.summary(), own.estimate
    assert summary.whole_step_us == estimate.whole_step_us
    assert summary.gap == estimate.gap
    assert summary.fsdp2.step_time_us == estimate.fsdp2.step_time_us > summary.step_time_us
    assert sum(summary.peak_by_category.values()) == summary.peak_bytes
    assert sum(summary.fsdp2.peak_by_category.values()) == summary.fsdp2.peak_bytes
    assert json.loads(json.dumps(asdict(summary)))["fsdp2"]["peak_bytes"] > 0


@pytest.mark.parametrize(("budget", "limit"), [(None, Limit.FSDP2), (10_000, Limit.BUDGET)])
def test_the_limit_is_called_what_it_is(budget, limit):
    own = planned(layers(4, activations=100, budget_bytes=budget))
    assert own.summary().limit is own.estimate.limit is limit
    assert own.summary().budget_bytes == (budget or own.estimate.fsdp2.peak_bytes)


def test_repr_is_one_line_whatever_the_size():
    assert repr(two_layers()) == (
        "Plan(toy: step 30.0 us, FSDP2 40.0 us; peak 200 B of 200 B; 2 groups)"
    )
    assert len(repr(planned(layers(300)))) < 100
    assert "\x1b" not in repr(replace(two_layers(), name="\x1b[31m"))


def test_a_notebook_shows_the_headline():
    own = replace(two_layers(), name="<b>")
    html = own._repr_html_()
    assert "<caption>&lt;b&gt;, 2 ranks, torch 2.13.0</caption>" in html
    names = re.findall(r"<tr><th>(\w+)</th>", html)
    assert names == ["step", "exposed", "peak", "limit", "gain"]
    assert len(html) < 2000


def test_a_plan_file_by_path(tmp_path):
    own = two_layers()
    own.save(tmp_path / "a.json")
    own.save(str(tmp_path / "b.json"))
    assert (tmp_path / "a.json").read_text() == own.to_json()
    assert Plan.load(str(tmp_path / "a.json")) == graphshard.load_plan(tmp_path / "b.json") == own


def test_a_plan_file_that_cannot_be_had(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(FileError, match=r"GS1202: .*x\.json is not a plan: .*schema 9"):
        Plan.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(FileError, match=r"GS1202: .*x\.json is not a plan: not JSON"):
        Plan.load(tmp_path / "x.json")
    with pytest.raises(FileError, match=r"GS1203: cannot read .*none\.json"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(FileError, match="GS1203: cannot write"):
        two_layers().save(tmp_path / "no" / "folder.json")


def test_the_page_as_text_and_as_a_file(tmp_path):
    page = two_layers().to_html()
    assert page.startswith("<!doctype html>")
    two_layers().to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page


def test_every_kind_of_step_has_a_lane():
    lanes = {kind: Step(kind).lane for kind in StepKind}
    assert set(lanes.values()) == set(Lane)
    assert lanes[StepKind.OFFLOAD_WAIT] is Lane.OFFLOAD
    assert lanes[StepKind.RELOAD_ISSUE] is Lane.RELOAD
    assert lanes[StepKind.RELEASE] is Lane.COMPUTE
    assert lanes[StepKind.GATHER_WAIT] is Lane.ALL_GATHER
    assert lanes[StepKind.REDUCE_ISSUE] is Lane.REDUCE_SCATTER


def test_an_empty_plan():
    empty = plan([], "")
    assert empty.residency() == ()
    assert empty.gathered_peak_bytes() == 0


def test_a_merged_gather_counts_all_its_groups_from_issue_to_wait():
    merged = plan(
        [group(0, "a", 100), group(1, "b", 60)],
        "issue 0+1, compute 1, wait 0+1, compute 1, release 0, release 1",
    )
    assert merged.gathered_bytes_by_step() == [160, 160, 320, 160, 160, 60]
    assert merged.summary().all_gathers == 1


def test_a_split_gather_counts_what_was_issued():
    params = tuple(group(0, "a", size).params[0] for size in (100, 60))
    both = replace(group(0, "a", 160), params=params)
    split = plan([both], "issue 0:0, wait 0:0, issue 0:1, wait 0:1, compute 1, release 0")
    assert split.gathered_bytes_by_step() == [100, 200, 160, 220, 160, 160]
    assert split.summary().all_gathers == 2
