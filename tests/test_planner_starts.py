"""More to choose from is no worse: plans that may compute again against plans of the same problem
in which so much is computed again already, where the room is worth most: one lane, busier than
compute, and links inside a node that are faster."""

import random
from dataclasses import replace

import pytest
from planning import layers, with_nodes

from graphshard.errors import InfeasibleBudget
from graphshard.planner.activations import Recompute
from graphshard.planner.plan_step import NODES_WORTH, plan_step
from graphshard.schedule.plan import Activation

COUNT = 12
GROUP_BYTES = 1711
# Bytes and microseconds of what each layer saves: about Llama 3 70B's, in MB.
LADDER = (
    *((134, 246.0), (134, 2267.0), (134, 369.0), (134, 248.0), (136, 3420.0)),
    *((134, 1633.0), (134, 246.0), (470, 5190.0), (470, 5190.0), (470, 335.0)),
)


def slow_network(seed):
    r = random.Random(seed)
    ladder = [(size, us * r.uniform(0.5, 2.0)) for size, us in LADDER]
    saved = sum(size for size, _ in ladder)
    problem = layers(
        COUNT,
        compute_us=25_000.0,
        gather_us=r.uniform(20_000.0, 40_000.0),
        reduce_us=46_000.0,
        size=GROUP_BYTES,
        activations=saved,
        shared_lane=True,
    )
    options = [
        Recompute(Activation(f"layers.{i}", number), i, COUNT - 1 - i, size, us)
        for i in range(COUNT)
        for number, (size, us) in enumerate(ladder)
    ]
    budget = int(saved * COUNT * r.uniform(0.5, 1.0)) + 5 * GROUP_BYTES
    problem = with_nodes(problem, ranks=8, faster=6.0) if r.random() < 0.7 else problem
    return replace(problem, recompute=tuple(options), budget_bytes=budget)


def computing_again(problem, chosen):
    """`problem` without options, where `chosen` of them are taken."""
    forward, backward = list(problem.forward), list(problem.backward)
    for option in chosen:
        for regions, places in (
            (forward, range(option.after + 1, len(forward))),
            (backward, range(option.before)),
        ):
            for place in places:
                region = regions[place]
                size = region.activation_bytes - option.saved_bytes
                regions[place] = replace(region, activation_bytes=size)
        region = backward[option.before]
        backward[option.before] = replace(region, us=region.us + option.extra_us)
    return replace(problem, forward=tuple(forward), backward=tuple(backward), recompute=())


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_no_worse_than_any_of_its_cheapest(seed):
    problem = slow_network(seed)
    planned_us = plan_step(problem).estimate.step_time_us
    compared = 0
    order = sorted(problem.recompute, key=lambda one: one.extra_us / one.saved_bytes)
    for count in range(0, len(order), 2 * COUNT):
        try:
            fixed = plan_step(computing_again(problem, order[:count]))
        except InfeasibleBudget:
            continue
        compared += 1
        assert (1 - NODES_WORTH) * planned_us <= fixed.estimate.step_time_us, count
    assert compared >= 2
