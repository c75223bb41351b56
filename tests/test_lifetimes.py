"""Lifetimes of tensors, and what an allocator reserves for them."""

from collections import Counter
from functools import partial
from itertools import accumulate

import pytest
from offline_models import llama, net, studied

from graphshard.offline.repeats import CAPTURED
from graphshard.pricing.lifetimes import At
from graphshard.pricing.liveness import Kind
from graphshard.pricing.reserved import reserved_bytes
from graphshard.schedule.plan import Direction

DEPTH = CAPTURED + 3
MODELS = {
    "net": partial(net, DEPTH),
    "llama": partial(llama, "selective", DEPTH),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_what_is_alive_during_an_op_is_what_lives_then(build):
    _, posed = studied(build, whole=True)
    costs = posed.costs.by_direction
    saved = {m.name for m in costs[Direction.FORWARD].memories if m.kind is not Kind.INPUTS}
    forward_ops = costs[Direction.FORWARD].usage.num_ops

    def clock(at):
        return at.op + (forward_ops if at.direction is Direction.BACKWARD else 0)

    alive = Counter()
    for one in posed.costs.lifetimes:
        alive[clock(one.born)] += one.size_bytes
        alive[clock(one.last) + 1] -= one.size_bytes
    for direction, own in costs.items():
        for memory in own.memories:
            if memory.kind is Kind.INPUTS and memory.name not in saved:
                alive[clock(At(direction, memory.born))] += memory.size_bytes
                alive[clock(At(direction, memory.last)) + 1] -= memory.size_bytes
    expected = [live.inputs + live.made + live.grads for own in costs.values() for live in own.live]
    assert list(accumulate(alive[op] for op in range(len(expected)))) == expected


def test_more_is_reserved_than_is_ever_in_use():
    plan, posed = studied(MODELS["llama"])
    reserved = reserved_bytes(
        plan.fsdp2.schedules, posed.problem, posed.costs.groups, posed.costs.lifetimes
    )
    assert reserved > plan.estimate.fsdp2.peak_bytes
