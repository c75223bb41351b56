"""The block that a run logs of a plan."""

from dataclasses import replace

from forecasts import as_predicted, planned
from planning import layers
from plans import two_layers

from graphshard.schedule.plan import Plan
from graphshard.view.log_text import collective_names, log_text
from graphshard.view.reasons import reason_text
from graphshard.view.scenario import predicted
from graphshard.view.text import group_names


def slow() -> Plan:
    """Every gather and every reduction is waited for."""
    return planned(layers(8, gather_us=400.0, reduce_us=400.0))


def test_a_plan_without_costs_is_one_line():
    text = log_text(two_layers())
    assert text == (
        "toy: 2 groups, 3 all-gathers and 2 reduce-scatters per step, at most 200 B of gathered "
        "parameters"
    )


def test_the_block_has_the_costs_and_the_largest_waits_with_their_cause():
    plan = slow()
    lines = log_text(plan).splitlines()
    own = predicted(plan)
    assert lines[1].startswith("  predicted: forward and backward ")
    assert f"{own.exposed_us / own.us:.1%}" in lines[1]
    assert lines[1].count("FSDP2") == 1
    waits = [line for line in lines if line.startswith("  exposed ")]
    assert len(waits) == 5
    texts = [reason_text(reason, group_names(plan)) for reason in plan.reasons]
    assert all(line.split(": ", 2)[2] in texts for line in waits)
    count = sum(c.wait is not None and own.works[c.wait].exposed_us > 0 for c in own.collectives)
    assert lines[-1] == f"  and {count - 5} more waits"


def test_what_was_measured_is_a_line():
    plan = slow()
    measured = as_predicted(plan)
    assert (
        "measured before this plan: forward and backward "
        in log_text(plan, measured).splitlines()[-1]
    )
    text = log_text(replace(plan, measured=measured), measured).splitlines()[-1]
    assert text.startswith("  measured: forward and backward ")
    assert "(+0.0 % against predicted)" in text


def test_collectives_have_their_names_in_order():
    assert list(collective_names(two_layers())) == [
        "graphshard::all_gather layers.0",
        "graphshard::all_gather layers.1",
        "graphshard::all_gather layers.0",
        "graphshard::reduce_scatter layers.1",
        "graphshard::reduce_scatter layers.0",
    ]
