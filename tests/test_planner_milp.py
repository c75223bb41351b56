"""The planner against exact optima where each group has several activations to choose from.

A mixed integer program (tests/milp.py) solves each problem anew, so no file can rot. It is held
against three others: its schedule takes that long, and fits, in the simulator; no plan is better;
on tiny problems, trying everything (tests/exhaustive.py) finds the same.
"""

from dataclasses import replace
from functools import cache
from itertools import groupby
from statistics import mean

import exhaustive
import milp
import pytest
from ladders import ladder_problem
from solve_small import UNLIMITED, random_budget

from graphshard.planner.checked import checked
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import TICK_US, Category
from graphshard.planner.simulate import simulate
from graphshard.schedule.plan import Direction, Schedule, Step, StepKind

COUNT = 100
TOLERANCE_US = 1e-3  # of the solver
# The goal is 3 % in the mean. Measured: 0.30 % in the mean, 4.67 % at worst.
MOST_MEAN, MOST = 0.01, 0.06
# Tiny problems where the best schedule has a collective overtake another: a gather in forward,
# gathers in backward, reductions.
OVERTAKING = (1016, 1775, 2182, 2240, 1070, 1081, 1104, 1111)
ISSUES = {
    "gather": StepKind.GATHER_ISSUE,
    "reduce": StepKind.REDUCE_ISSUE,
    "await": StepKind.REDUCE_WAIT,
}


@cache
def posed(seed):
    """A problem with its budget."""
    problem = checked(ladder_problem(seed))
    return replace(problem, budget_bytes=random_budget(seed, problem))


def solved(problem, planned_us):
    """The optimum. The plan's time only cuts the solver's work short: were the plan better than
    every schedule that the program knows, nothing would be found."""
    found = milp.optimum(problem, problem.budget_bytes, planned_us + TICK_US)
    assert found is not None, f"the plan is better than the optimum: {planned_us} us"
    return found


def as_schedules(problem, found):
    orders = zip(Direction, found.orders, strict=True)
    return [Schedule(d, tuple(_steps(problem, d, found.kept, order))) for d, order in orders]


def _steps(problem, direction, kept, order):
    forward = direction is Direction.FORWARD
    for what, number in order:
        if what == "region":
            yield Step(StepKind.COMPUTE, start=number, stop=number + 1)
            for group in problem.groups:
                part = group.parts[0]
                if (part.forward if forward else part.backward).last == number:
                    yield Step(StepKind.RELEASE, group.id, kept=forward and group.id in kept)
        elif what == "wait":
            stays = not forward and number in kept
            if stays:
                yield Step(StepKind.GATHER_ISSUE, number, kept=True)
            yield Step(StepKind.GATHER_WAIT, number, kept=stays)
        else:
            yield Step(ISSUES[what], number)


def test_plans_that_choose_activations_are_near_the_optimum():
    gaps = {}
    for seed in range(COUNT):
        problem = posed(seed)
        estimate = plan_step(problem).estimate
        assert estimate.peak_bytes <= problem.budget_bytes
        found = solved(problem, estimate.step_time_us)
        real = simulate(problem, as_schedules(problem, found), found.recompute)
        assert real.step_us == pytest.approx(found.step_us, abs=TOLERANCE_US, rel=0)
        assert real.peak_bytes <= problem.budget_bytes
        assert estimate.step_time_us >= found.step_us - TOLERANCE_US
        gaps[seed] = max(0.0, estimate.step_time_us / real.step_us - 1)
    _print(gaps)
    assert mean(gaps.values()) <= MOST_MEAN
    assert max(gaps.values()) <= MOST


def _print(gaps):
    def size(seed):
        return len(posed(seed).groups)

    for count, seeds in groupby(sorted(gaps, key=size), key=size):
        found = [gaps[seed] for seed in seeds]
        share = sum(gap > 0 for gap in found)
        print(f"{count} groups: {len(found)} problems, {share} not optimal, mean {mean(found):.3%}")
    worst = max(gaps, key=gaps.get)
    print(f"all: mean {mean(gaps.values()):.3%}, worst {gaps[worst]:.3%} (seed {worst})")


@pytest.mark.parametrize("seed", [*range(1000, 1010), *OVERTAKING])
def test_trying_everything_finds_the_same(seed):
    problem = checked(ladder_problem(seed, most_groups=3, rungs=(1, 2)))
    budget_bytes = random_budget(seed, problem)
    problem = replace(problem, budget_bytes=budget_bytes)
    planned_us = plan_step(problem).estimate.step_time_us
    tried_us = exhaustive.optimum(problem, budget_bytes, planned_us + TICK_US)
    assert solved(problem, planned_us).step_us == pytest.approx(tried_us, abs=TOLERANCE_US, rel=0)


def test_activations_fill_most_of_the_memory():
    """Otherwise the problems above would say nothing about what is computed again."""
    shares = []
    for seed in range(0, COUNT, 5):
        figures = plan_step(replace(posed(seed), budget_bytes=UNLIMITED)).estimate.ours
        shares.append(dict(figures.peak_by_category)[Category.ACTIVATION] / figures.peak_bytes)
    print(f"activations at the peak without a limit: {mean(shares):.0%} in the mean")
    assert mean(shares) > 0.7


def test_the_program_refuses_what_it_does_not_cover():
    problem = posed(0)
    assert milp.refused(problem) is None
    assert "micro-steps" in milp.refused(replace(problem, micro_steps=2))
    option = problem.recompute[0]
    greedy = replace(option, saved_bytes=option.saved_bytes * 100)
    assert "than is alive" in milp.refused(replace(problem, recompute=(greedy,)))
