"""What backward computes again frees what the planner was promised, and nothing else."""

import functools
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from drawing import drawing
from graphs import aten
from hypothesis import given
from hypothesis import strategies as st
from offline_models import Block, Net, llama, mixtral, net, shard, the_example, tokens
from planning import layers
from torch import nn
from torch.nn.functional import gelu

from graphshard.compiler.partition import parts_of, repeating
from graphshard.compiler.planning import is_worth
from graphshard.cost.presets import preset
from graphshard.graph.program import copy_of
from graphshard.offline.capture import capture
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, pretended
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.planner.plan_step import plan_step
from graphshard.pricing.liveness import saved_memory
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.problem import PlanningPolicy
from graphshard.pricing.recompute import ChosenUnits
from graphshard.schedule.plan import Direction, Figures, Plan, Reshard

COUNT = int(os.environ.get("GRAPHSHARD_AGAIN", "4"))
SEED = os.environ.get("GRAPHSHARD_AGAIN_SEED")
LLAMA, MIXTRAL = functools.partial(llama, "none"), functools.partial(mixtral, "none")


def saved_bytes(parts):
    """Of what forward hands to backward; what is gathered is not among it."""
    found = saved_memory(parts.placed.forward.graph).values()
    return sum({memory.name: memory.size_bytes for memory in found}.values())


@functools.cache
def joint_graph_of(build):
    with pretended(8):
        return capture(faked(lambda: made_of("net", build())), "net").joint_graph


@functools.cache
def captured(build, fused):
    """A captured model, cut so that everything is saved, and what could be computed again."""
    joint_graph = joint_graph_of(build)
    with pretended(8):
        parts = parts_of(joint_graph, copy_of(joint_graph.program.joint), fused=fused)
    found = graph_costs(parts.placed, preset("h100"), recompute=True, fused=fused).units
    return joint_graph, parts, found


def with_needed(found, chosen):
    """`chosen`, and what they mean nothing without; in the order of `found`."""
    names = {(unit.group, unit.number) for unit in chosen}
    for unit in reversed(found):  # what is needed comes first
        if (unit.group, unit.number) in names and unit.needs is not None:
            names.add((unit.group, unit.needs))
    return [unit for unit in found if (unit.group, unit.number) in names]


def drawn_cuts(build, fused, check):
    """`check(chosen, again)` for drawn units of a captured model, and it cut so that backward
    computes these again."""
    joint_graph, parts, found = captured(build, fused)

    @drawing(COUNT, SEED)
    @given(st.sets(st.sampled_from(range(len(found))), min_size=1))
    def draw(places):
        chosen = with_needed(found, {found[place] for place in places})
        with pretended(8):
            joint = joint_graph.program.joint
            again = repeating(joint_graph, joint, parts, ChosenUnits(tuple(chosen)), fused=fused)
        check(chosen, again)

    draw()


@pytest.mark.parametrize("fused", [False, True], ids=["aten", "inductor"])
@pytest.mark.parametrize("build", [net, LLAMA, MIXTRAL], ids=["net", "llama", "mixtral"])
def test_units_free_what_they_promise_whichever_are_chosen(build, fused):
    _, parts, _ = captured(build, fused)

    def check(chosen, again):
        promised = sum(unit.saved_bytes for unit in chosen)
        assert saved_bytes(parts) - saved_bytes(again) == promised > 0

    drawn_cuts(build, fused, check)


class Routed(Block):
    """Some rows alone go through it: how many is data."""

    def forward(self, x):
        wide = gelu(self.up(self.norm(x))).flatten(0, 1)
        return x + self.down(wide[wide[:, 0] > 0]).sum(0)


def routed():
    model = Net(nn.ModuleList(Routed() for _ in range(3)))
    shard(model)
    return model, (tokens(),)


@pytest.mark.parametrize("fused", [False, True], ids=["aten", "inductor"])
def test_what_finds_a_size_in_data_is_not_run_twice(fused):
    """What is computed again may have another last bit, and so the size another value."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _, parts, found = captured(routed, fused)
    nodes = parts.placed.forward.graph.nodes
    finding = {
        n.name for n in nodes if n.meta.get("unbacked_bindings") or n.target is aten.gt.Scalar
    }
    assert len(finding) == 6
    again = {name for unit in found for name in unit.nodes}
    assert again
    assert finding.isdisjoint(again)
    backward = parts.placed.backward.graph.nodes
    assert finding.isdisjoint(n.name for n in backward if n.op == "call_function")


def blocks_of_8b():
    """4 blocks of Llama 3 8B: keys and values of 8 heads, repeated for 32."""
    example = the_example()
    config = replace(example.LLAMA3_8B, recompute="none", num_layers=4)
    return example.sharded(config, 1, 8192)


def test_units_cost_what_they_promise():
    """Fused, where a value that a cut separates from its readers is stored after all."""
    _, parts, _ = captured(blocks_of_8b, True)
    machine = preset("h100")

    def backward_us(cut):
        costs = graph_costs(cut.placed, machine, recompute=False, fused=True)
        return sum(costs.by_direction[Direction.BACKWARD].us)

    before_us = backward_us(parts)

    def check(chosen, again):
        promised_us = sum(unit.extra_us for unit in chosen)
        assert backward_us(again) - before_us <= 1.02 * promised_us + 1.0

    drawn_cuts(blocks_of_8b, True, check)


def test_keys_and_values_come_from_a_quarter_of_them():
    """Saved before they are repeated, they take a repetition, not a product."""
    _, _, found = captured(blocks_of_8b, True)
    middle = [u for u in found if u.group == found[len(found) // 2].group]
    heads = [(u, more) for u in middle for more in middle if more.needs == u.number]
    assert [(u.origin.op, more.origin.op) for u, more in heads] == [
        ("clone", "_to_copy"),
        ("clone", "mm"),
    ]
    for unit, more in heads:
        assert unit.saved_bytes == 3 * more.saved_bytes
        assert unit.extra_us / unit.saved_bytes < more.extra_us / more.saved_bytes / 5


def kinds(found):
    """Of a Llama's middle block: matrix products and attentions in each whole unit."""
    middle = found[len(found) // 2].group
    return [
        tuple(sum(name.startswith(kind) for name in u.nodes) for kind in ("mm_", "_scaled_dot"))
        for u in found
        if u.group == middle
    ]


def test_what_each_op_saves_is_a_choice_of_its_own():
    """Products with queries, keys, values, for gate and up, and attention."""
    _, _, found = captured(LLAMA, False)
    assert sorted(filter(any, kinds(found))) == [(0, 1)] + [(1, 0)] * 5
    numbers = [(u.group, u.number) for u in found]
    assert len(numbers) == len(set(numbers))


def plan_that_takes(step_us, exposed_us):
    planned = plan_step(layers(2))
    estimate = replace(planned.estimate, ours=Figures(step_us, exposed_us, 1000))
    forward, backward = planned.schedules
    return Plan("net", "", (), forward, backward, estimate=estimate)


@pytest.mark.parametrize(
    ("step_us", "exposed_us", "worth"),
    [
        pytest.param(950.0, 240.0, True, id="a twentieth, for a hundredth more compute"),
        pytest.param(985.0, 285.0, False, id="less than a prediction is good for"),
        pytest.param(950.0, 150.0, False, id="gone if the compute is half as long again"),
        pytest.param(850.0, 50.0, True, id="much, for much"),
        pytest.param(950.0, 260.0, True, id="less compute, too"),
        pytest.param(1010.0, 300.0, False, id="a loss"),
    ],
)
def test_what_is_computed_again_has_to_pay(step_us, exposed_us, worth):
    """Against 1,000 us, of which 700 us are compute."""
    assert is_worth(plan_that_takes(step_us, exposed_us), plan_that_takes(1000.0, 300.0)) == worth


def point_of(budget, fused):
    policy = PlanningPolicy(budget, reshard=Reshard.OPEN, recompute=True, regroup=True)
    return Point(8, 8, preset("h100"), policy, fused=fused)


@pytest.mark.parametrize(
    ("build", "fused"), [(net, False), (LLAMA, True)], ids=["net, aten", "llama, inductor"]
)
def test_more_memory_fits_and_is_no_slower(build, fused):
    """From what everything computed again needs to what FSDP2 itself does."""
    points = (point_of(None, fused),)
    study = Study("net", lambda sizes: made_of("net", build()), points, whole=True)
    study.prepare()  # one capture for all budgets
    free, tiny = (study.answer(point_of(b, fused)) for b in (None, LEAST_PLAUSIBLE_BYTES))
    low, high = tiny.infeasible.shortage.least_bytes, free.plan.estimate.peak_bytes
    try_again = study.answer(point_of(low, fused)).infeasible
    if try_again is not None:  # it was a promise for another graph
        low = try_again.shortage.least_bytes
    budgets = [low + (high - low) * share // 5 for share in range(6)]
    found = [study.answer(point_of(budget, fused)).plan.estimate for budget in budgets]
    assert all(own.peak_bytes <= budget for own, budget in zip(found, budgets, strict=True))
    steps = [own.step_time_us for own in found]
    assert all(more <= 1.005 * less for less, more in pairwise(steps)), steps
    assert steps[-1] < steps[0]
