"""When a region needs most memory, and which gradients are not there then: drawn, against a look at
each op.

Assumed in `with_late_gradients`: between two ops that make gradients the same ones are missing.
"""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from graphshard.planner.problem import Category, Region
from graphshard.pricing.region_split import Divided, with_late_gradients
from graphshard.schedule.estimate import Allocation


@dataclass(frozen=True)
class Grad:
    """first: the region that it is counted from. op: what makes it, in this region or later."""

    group: int
    place: int
    first: int
    op: int
    size_bytes: int


@st.composite
def steps(draw):
    """Bytes alive in each op, where regions start, and gradients of groups of up to 3 parameters,
    one part for each; sizes are few, so that there are ties."""
    alive = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    starts = draw(st.sets(st.integers(1, len(alive) - 1))) if len(alive) > 1 else set()
    starts = [0, *sorted(starts), len(alive)]
    grads = []
    for group in range(draw(st.integers(0, 3))):
        for place in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, len(starts) - 2))
            op = draw(st.integers(starts[first], len(alive) - 1))
            grads.append(Grad(group, place, first, op, draw(st.integers(0, 6))))
    return alive, starts, grads


def by_each_op(alive, starts, grads):
    """As it is defined."""
    for index, (start, stop) in enumerate(pairwise(starts)):
        counted = [one for one in grads if one.first <= index and one.op > start]
        needed = [
            alive[op] - sum(one.size_bytes for one in counted if one.op > op)
            for op in range(start, stop)
        ]
        fullest = start + needed.index(max(needed))
        yield (
            max(alive[start:stop]) - alive[fullest],
            [(one.group, one.size_bytes) for one in counted if one.op > fullest],
        )


@given(steps())
def test_it_is_what_a_look_at_each_op_finds(given):
    alive, starts, grads = given
    groups = sorted({one.group for one in grads})
    own = {group: [one for one in grads if one.group == group] for group in groups}
    reductions = [
        SimpleNamespace(group=group, made=[(one.place, one.op) for one in own[group]])
        for group in groups
    ]
    regions = [Region(1.0, max(alive[start:stop])) for start, stop in pairwise(starts)]
    usage = SimpleNamespace(reductions=reductions)
    divided = Divided(usage, tuple(starts), tuple(regions), tuple(alive))
    params = [
        SimpleNamespace(
            params=[
                SimpleNamespace(trainable=True, grad_bytes=one.size_bytes) for one in own[group]
            ]
        )
        for group in groups
    ]
    parts = [
        SimpleNamespace(
            id=group,
            parts=[
                SimpleNamespace(gradient=SimpleNamespace(first=one.first), params=(one.place,))
                for one in own[group]
            ],
        )
        for group in groups
    ]
    found = with_late_gradients(divided, params, parts)
    for region, (idle_bytes, absent) in zip(found, by_each_op(alive, starts, grads), strict=True):
        assert region.idle_bytes == idle_bytes
        assert region.absent == tuple(
            Allocation(Category.UNSHARDED_GRAD, size_bytes, group) for group, size_bytes in absent
        )
