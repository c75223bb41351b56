"""Why something is computed again: facts from the units, and where the views show them."""

from collections import Counter

import pytest
from graphs import group
from offline_models import llama, planned, point

from graphshard.pricing.recompute import RecomputeUnit
from graphshard.pricing.recompute_reasons import recompute_reasons
from graphshard.schedule.groups import Activation, Origin, Recomputed
from graphshard.schedule.plan import Plan
from graphshard.schedule.reasons import ExchangeRate, Recomputation
from graphshard.view.cards import COMPUTED_AGAIN, decisions
from graphshard.view.groups import table_of
from graphshard.view.memory import memory_of
from graphshard.view.sheet import sheet_of
from graphshard.view.why import why_text

GIB = 1024**3
NORM, GATE = Origin("rsqrt", "norm"), Origin("mm", "gate")


def unit(number, origin, extra_us, saved_bytes=GIB, group=0):
    return RecomputeUnit(group, number, (), 1, 1, saved_bytes, extra_us, origin)


UNITS = (unit(0, NORM, 10.0), unit(2, GATE, 300.0, 2 * GIB), unit(0, NORM, 20.0, group=1))
GROUPS = (group(0), group(1))


def reasons(*chosen):
    return list(recompute_reasons(UNITS, GROUPS, Recomputed(chosen)))


def test_each_group_of_which_something_is_computed_again_has_a_reason():
    assert reasons(Activation("layers.0", 0)) == [
        Recomputation(0, again=(NORM,), saved=(GATE,), extra_us=10.0, saved_bytes=GIB),
        ExchangeRate(taken_us_per_gib=10.0, left_us_per_gib=20.0),
    ]


def test_the_rate_is_of_the_dearest_taken_and_the_cheapest_left():
    assert reasons()[-1] == ExchangeRate(None, 10.0)
    every = [Activation("layers.0", 0), Activation("layers.0", 2), Activation("layers.1", 0)]
    assert reasons(*every)[-1] == ExchangeRate(150.0, None)
    assert [reason.group for reason in reasons(*every)[:-1]] == [0, 1]
    assert list(recompute_reasons((), GROUPS, Recomputed())) == []


@pytest.fixture(scope="module")
def plan():
    """Of a Llama within half of what it saves."""

    def build():
        return llama("none")

    (free,) = planned(build, [point(budget=1 << 30)])
    limit = free.estimate.ours.peak_bytes - free.estimate.ours.peak_bytes // 6
    (found,) = planned(build, [point(budget=limit)])
    assert found.recompute.activations
    return Plan.from_json(found.to_json())


def test_a_plan_says_what_it_computes_again_as_it_does(plan):
    found = {r.group: r for r in plan.reasons if isinstance(r, Recomputation)}
    counts = Counter(activation.group for activation in plan.recompute.activations)
    assert {plan.groups[number].fqn: len(r.again) for number, r in found.items()} == counts
    origins = {o for r in found.values() for o in (*r.again, *r.saved)}
    assert {Origin("mm", "feed_forward.gate"), Origin("mm", "feed_forward.up")} <= origins


def test_views_say_so_for_each_group_and_for_the_peak(plan):
    sheet = sheet_of(plan)
    by_group = {r.group: r for r in plan.reasons if isinstance(r, Recomputation)}
    table = table_of(sheet)
    column = table.titles.index(COMPUTED_AGAIN)
    for line in table.lines:
        own = by_group.get(line.group)
        text = f"{len(own.again)} of {len(own.again) + len(own.saved)}" if own else "-"
        assert line.cells[column].text == text
        assert (COMPUTED_AGAIN in dict(decisions(sheet, line.group))) == (own is not None)
    peak = dict(memory_of(sheet).peak.card)
    assert "for each GiB" in peak["for memory"]
    assert "computed again" in peak[COMPUTED_AGAIN]


def test_the_reasons_as_text_name_ops_by_their_modules(plan):
    text = " ".join(why_text(plan).split())
    assert "time for memory" in text
    assert "feed_forward.gate mm" in text
    assert "activations (" in text
