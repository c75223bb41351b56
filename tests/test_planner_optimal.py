"""The planner against exact optima of small problems, with every kind of decision.

`small_optima.json` holds problems (by seed), budgets and optima; tests/solve_small.py writes it.
"""

import json
from dataclasses import replace
from statistics import mean

import pytest
from exhaustive import optimum
from solve_small import PATH, small_problem

from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import TICK_US

SOLVED = json.loads(PATH.read_text())["solved"]
# Every twentieth of those that have few groups: their exhaustive search takes little time.
AGAIN = [row for row in SOLVED if len(small_problem(row["seed"]).groups) <= 3]
AGAIN = AGAIN[:: len(AGAIN) // 10][:10]


def test_plans_of_small_problems_are_near_the_optimum():
    gaps = []
    for row in SOLVED:
        problem = replace(small_problem(row["seed"]), budget_bytes=row["budget_bytes"])
        estimate = plan_step(problem).estimate
        assert estimate.peak_bytes <= row["budget_bytes"]
        assert estimate.step_time_us >= row["optimum_us"]
        gaps.append(estimate.step_time_us / row["optimum_us"] - 1)
    print(f"{len(gaps)} problems: mean gap {mean(gaps):.4%}, worst {max(gaps):.4%}")
    assert len(gaps) >= 200
    assert mean(gaps) <= 0.02
    assert max(gaps) <= 0.10


@pytest.mark.parametrize("row", AGAIN, ids=lambda row: str(row["seed"]))
def test_the_file_holds_optima(row):
    problem = small_problem(row["seed"])
    assert optimum(problem, row["budget_bytes"], row["optimum_us"]) is None
    again_us = optimum(problem, row["budget_bytes"], row["optimum_us"] + TICK_US)
    assert again_us == row["optimum_us"]
