"""Writes tests/small_optima.json: small random problems, a budget for each, the exact optimum.

`python tests/solve_small.py [COUNT] [SECONDS]` solves seeds 0, 1, ... until COUNT are solved, and
goes on where it stopped. A seed whose exhaustive search takes more than SECONDS of CPU time is
left out and listed under "skipped".
"""

import json
import random
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from exhaustive import optimum
from planning import random_problem

from graphshard.planner.checked import checked
from graphshard.planner.infeasible import least_peak
from graphshard.planner.memo import Memo
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import TICK_US

MOST_GROUPS = 6
PATH = Path(__file__).with_name("small_optima.json")
UNLIMITED = 1 << 40


def small_problem(seed):
    return checked(random_problem(seed, MOST_GROUPS))


def random_budget(seed, problem):
    """Between the least feasible peak and the peak without a limit, more often near the least."""
    least = least_peak(Memo(problem)).peak_bytes
    most = plan_step(replace(problem, budget_bytes=UNLIMITED)).estimate.peak_bytes
    return int(least + random.Random(seed).random() ** 1.5 * max(0, most - least))


def solve(seed, seconds):
    """One row of the file, or None if it takes longer than `seconds`."""

    def late(*_):
        raise TimeoutError

    problem = small_problem(seed)
    budget = random_budget(seed, problem)
    planned = plan_step(replace(problem, budget_bytes=budget)).estimate.step_time_us
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        best_us = optimum(problem, budget, planned + TICK_US)
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"seed": seed, "budget_bytes": budget, "optimum_us": best_us}


def main(count=200, seconds=15):
    rows, skipped = [], []
    if PATH.exists():
        before = json.loads(PATH.read_text())
        rows, skipped = before["solved"], before["skipped"]
    seed = len(rows) + len(skipped)
    with ProcessPoolExecutor(2) as pool:
        while len(rows) < count:
            seeds = range(seed, seed + min(20, count - len(rows)))
            seed = seeds.stop
            results = pool.map(solve, seeds, [seconds] * len(seeds))
            for found, tried in zip(results, seeds, strict=True):
                rows.append(found) if found else skipped.append(tried)
            lines = ",\n".join(json.dumps(row) for row in rows)
            PATH.write_text(f'{{"skipped": {skipped},\n"solved": [\n{lines}\n]}}\n')
            print(f"{len(rows)} solved, {len(skipped)} skipped", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
