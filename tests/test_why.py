"""`graphshard show PLAN --why --group FQN`: the reasons that concern a group."""

import json
from dataclasses import replace

import pytest
from forecasts import planned
from planning import layers
from plans import two_layers

from graphshard.cli import main
from graphshard.schedule.plan import Direction, Schedule
from graphshard.schedule.reasons import Bound, NotEarlier, group_of
from graphshard.view.reasons import reason_text
from graphshard.view.text import group_names
from graphshard.view.why import reasons_of, why_text


@pytest.fixture
def plan():
    return planned(layers(4, gather_us=150.0, root=True))


def test_every_reason_of_a_group_is_printed_and_no_other(plan):
    text = " ".join(why_text(plan, "layers.2").split())
    for reason in plan.reasons:
        assert (reason in reasons_of(plan, "layers.2")) == (group_of(reason) == 2), reason
        if group_of(reason) == 2:
            assert reason_text(reason, group_names(plan)) in text


def test_without_a_group_all_reasons_with_their_groups(plan):
    text = why_text(plan)
    assert reasons_of(plan) == list(plan.reasons)
    assert "forward, issue all-gather, layers.3" in text
    assert max(map(len, text.splitlines())) <= 92


def test_a_shared_collective_concerns_each_group_that_it_carries(plan):
    first, *others = plan.forward.steps
    shared = Schedule(Direction.FORWARD, (replace(first, with_groups=(1,)), *others))
    reason = NotEarlier(first.group, Direction.FORWARD, first.kind, Bound.FIRST)
    plan = replace(plan, forward=shared, reasons=(reason,))
    assert reasons_of(plan, "layers.1") == [reason]
    assert reasons_of(plan, "layers.2") == []


def test_the_command_prints_it(plan, tmp_path, capsys):
    path = tmp_path / "toy.json"
    path.write_text(plan.to_json())
    assert main(["show", str(path), "--why", "--group", "layers.1"]) == 0
    assert capsys.readouterr().out == why_text(plan, "layers.1")
    assert main(["show", str(path), "--why", "--json", "--group", "layers.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in found] == [
        reason_text(r, group_names(plan)) for r in reasons_of(plan, "layers.1")
    ]
    assert main(["show", str(path), "--why", "--group", "layer.1"]) == 2
    assert "no group 'layer.1'; did you mean 'layers.1'?" in capsys.readouterr().err


def test_a_plan_without_reasons_says_so():
    assert "the plan has no reasons" in why_text(two_layers(), "layers.0")
