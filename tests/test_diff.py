"""Two plans, or a plan and a measurement: what moved, and contributions that add up."""

import json
import math
from dataclasses import replace

import pytest
from forecasts import as_predicted, planned
from planning import layers, random_problem
from plans import two_layers

from graphshard.cli import main
from graphshard.errors import MeasureError
from graphshard.schedule.plan import Activation, Direction, Recomputed
from graphshard.view.diff import REST, WAITS, diff, diff_measured
from graphshard.view.diff_text import diff_dict, diff_text
from graphshard.view.text import WIDTH

SLOW = {"gather_us": 150.0, "activations": 100}


def pair(**settings):
    """What FSDP2 would run, as a plan, and a plan that may keep everything."""
    after = planned(layers(6, **SLOW, budget_bytes=1 << 40, **settings))
    forward, backward = after.fsdp2.schedules
    estimate = replace(after.estimate, ours=after.estimate.fsdp2)
    before = replace(
        after, forward=forward, backward=backward, forecasts=after.fsdp2.forecasts,
        estimate=estimate,
    )  # fmt: skip
    return before, after


def total(found):
    return math.fsum(part.change_us for part in found.contributions)


def test_a_plan_does_not_differ_from_itself():
    plan, _ = pair()
    found = diff(plan, plan)
    assert found.moves == found.contributions == ()
    assert found.step_time_us.change == found.exposed_us.change == found.peak_bytes.change == 0


def test_contributions_add_up_to_the_difference():
    for settings in ({}, {"micro_steps": 3}, {"shared_lane": True}):
        before, after = pair(**settings)
        for one, other in ((before, after), (after, before)):
            found = diff(one, other)
            assert found.step_time_us.before == one.estimate.step_time_us
            assert found.step_time_us.change != 0
            assert math.isclose(total(found), found.step_time_us.change, abs_tol=1e-6)
            sizes = [abs(part.change_us) for part in found.contributions]
            assert sizes == sorted(sizes, reverse=True)


def test_waits_add_up_to_the_exposed_time():
    before, after = pair()
    found = diff(before, after)
    waits = [part for part in found.contributions if part.kind == WAITS]
    assert REST not in {part.kind for part in found.contributions}
    assert math.isclose(sum(p.change_us for p in waits), found.exposed_us.change)


def test_what_moved_is_said():
    before, after = pair()
    kept = {s.group for s in after.forward.steps if s.kept}
    assert kept
    assert not {s.group for s in before.forward.steps if s.kept}
    found = diff(before, after)
    assert [m.groups for m in found.moves if m.what == "kept"] == [
        (f"layers.{group}",) for group in sorted(kept)
    ]
    back = diff(after, before)
    assert [m.groups for m in back.moves if m.what == "resharded"] == [
        (f"layers.{group}",) for group in sorted(kept)
    ]
    there, here = (
        {(m.direction, m.groups, m.text.split(":")[0]): (m.what, m.num_ops)
         for m in one.moves if m.num_ops}
        for one in (found, back)
    )  # fmt: skip
    assert there
    opposite = {"earlier": "later", "later": "earlier"}
    assert here == {key: (opposite[way], ops) for key, (way, ops) in there.items()}


def test_merged_split_and_recomputed_groups_are_said():
    whole = "issue 0, issue 1, wait 0, wait 1, compute 4, release 0, release 1"
    one = replace(two_layers(), backward=None)
    merged = "issue 0+1, wait 0+1, compute 4, release 0, release 1"
    split = "issue 0:0, issue 0:1, issue 1, wait 0:0, wait 0:1, wait 1, compute 4, release 0, "
    from plans import steps

    from graphshard.view.moves import moves

    plans = [
        replace(one, forward=replace(one.forward, steps=steps(text)))
        for text in (whole, merged, split + "release 1")
    ]
    said = [(m.what, m.groups, m.direction) for m in moves(plans[0], plans[1])]
    assert said == [("together", ("layers.0", "layers.1"), Direction.FORWARD)]
    said = [(m.what, m.groups) for m in moves(plans[1], plans[0])]
    assert said == [("alone", ("layers.0",)), ("alone", ("layers.1",))]
    said = [m.text for m in moves(plans[0], plans[2])]
    assert said == [f"all-gather in forward: one for parameters {n}" for n in (0, 1)]
    again = replace(plans[0], recompute=Recomputed((Activation("layers.1", 1),)))
    assert [m.what for m in moves(plans[0], again)] == ["recomputed"]
    assert [m.what for m in moves(again, plans[0])] == ["not recomputed"]
    more = replace(
        plans[0], recompute=Recomputed((Activation("layers.1", 0), Activation("layers.1", 1)))
    )
    assert [m.text for m in moves(again, more)] == ["more of it is computed again in backward"]
    (fewer,) = moves(more, again)
    assert fewer.text == "some of it is no longer computed again in backward"


def test_a_measurement_is_a_side():
    plan, _ = pair()
    measured = replace(as_predicted(plan, compute=1.25), step_time_us=5000.0)
    found = diff_measured(plan, measured)
    assert (found.before, found.after) == ("predicted", "measured")
    assert found.step_time_us.after == 5000.0
    assert found.peak_bytes.after is None
    assert math.isclose(total(found), found.step_time_us.change)
    kinds = {part.kind for part in found.contributions}
    assert kinds == {"compute", REST}
    assert "medians, other micro-steps" in diff_text(found)


def test_the_text_is_a_screen_and_adds_up():
    before, after = pair()
    found = diff(before, after)
    lines = diff_text(found).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split() == ["before", "after", "change"]
    assert lines[1].startswith("forward and backward")
    assert any(line.startswith("what moved") for line in lines)
    assert lines[-1].startswith("  together")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, groups=p.groups[:-1]), "layers.5.weight of group layers.5"),
        (lambda p: replace(p, backward=None), "different graphs"),
        (lambda p: replace(p, forecasts=()), "GS803"),
    ],
)
def test_what_cannot_be_compared_is_an_error(change, says):
    before, after = pair()
    with pytest.raises(MeasureError, match=says):
        diff(before, change(after))


def test_times_of_another_graph_are_an_error():
    plan, _ = pair()
    with pytest.raises(MeasureError, match="GS805"):
        diff_measured(plan, as_predicted(planned(layers(2))))


@pytest.fixture
def files(tmp_path):
    before, after = pair()
    measured = replace(before, measured=as_predicted(before, compute=1.25))
    named = {"a": before, "b": after, "m": measured, "other": planned(layers(2))}
    for name, plan in named.items():
        (tmp_path / name).write_text(plan.to_json())
    return {name: str(tmp_path / name) for name in named}


def test_the_command_compares_plans(files, capsys):
    assert main(["diff", files["a"], files["b"]]) == 0
    assert "why forward and backward differ by" in capsys.readouterr().out
    assert main(["diff", files["a"], files["b"], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(diff_dict(diff(*pair()))))
    assert math.isclose(
        math.fsum(c["change_us"] for c in found["contributions"]), found["step_time_us"]["change"]
    )


def test_the_command_compares_with_what_was_measured(files, capsys):
    assert main(["diff", files["a"], "--measured", files["m"]]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out
    assert main(["diff", files["m"]]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a", "other"], "GS805"),
        (["a"], "GS801"),
        (["a", "b", "--measured", "m"], "not both"),
        (["a", "--measured", "missing"], "cannot read"),
        (["missing", "a"], "cannot read"),
    ],
)
def test_the_command_says_what_is_wrong(files, capsys, argv, says):
    words = [word if word.startswith("-") else files.get(word, word) for word in argv]
    assert main(["diff", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("seed", range(15))
def test_contributions_add_up_on_random_plans(seed):
    after = planned(random_problem(seed, options=False, regroup=False))
    forward, *backward = after.fsdp2.schedules
    before = replace(
        after, forward=forward, backward=backward[0] if backward else None,
        forecasts=after.fsdp2.forecasts,
        estimate=replace(after.estimate, ours=after.estimate.fsdp2),
    )  # fmt: skip
    found = diff(before, after)
    assert math.isclose(total(found), found.step_time_us.change, abs_tol=1e-6)
    diff_text(found)
