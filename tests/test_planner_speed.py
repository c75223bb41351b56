"""How long planning takes, in CPU time of this process (the machine may be shared)."""

import time
from dataclasses import replace

import pytest
from planning import layers

from graphshard.planner.plan_step import fsdp2, plan_step


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "limit_s"), [(130, 2.0), (1000, 30.0)])
def test_planning_takes_little_time(groups, limit_s):
    """Both directions, with merging and reshard free, under FSDP2's own peak and 1.3 times that."""
    problem = layers(groups, gather_us=150.0, root=True, activations=300, temporary=100)
    own_bytes = fsdp2(problem).peak_bytes
    for budget in (None, own_bytes * 13 // 10):
        start_s = time.process_time()
        plan_step(replace(problem, budget_bytes=budget))
        took_s = time.process_time() - start_s
        print(f"{groups} groups, budget {budget}: {took_s:.2f} s")
        assert took_s < limit_s
