"""Where compiled code is cut: near what needs it, where little crosses, alike in alike blocks."""

from dataclasses import replace

import graphs
import pytest
import torch

from graphshard.graph.program import compute_nodes
from graphshard.pricing.region_cuts import aligned, crossing_bytes, late_params
from graphshard.pricing.usage import GradReady, GroupUse, ParamUse, Usage
from graphshard.schedule.plan import Direction

aten = torch.ops.aten

CHEAP_BETWEEN = [10.0] * 4 + [1.0] * 2 + [10.0] * 4


def forward(*blocks, num_ops, direction=Direction.FORWARD):
    """blocks: (first, last) op that reads each group, of one parameter."""
    uses = tuple(GroupUse(g, first, last) for g, (first, last) in enumerate(blocks))
    params = tuple(ParamUse(g, 0, first, last) for g, (first, last) in enumerate(blocks))
    return Usage(direction, num_ops, uses, (), frozenset(), params)


def test_a_wait_and_the_release_before_it_share_the_cheapest_cut():
    # Group 0 is read until op 3, group 1 from op 6 on; between them place 5 is the narrowest.
    crossing = [0, 9, 9, 9, 8, 2, 4, 9, 9, 9, 0]
    found = aligned(forward((0, 3), (6, 9), num_ops=10), crossing, CHEAP_BETWEEN)
    assert found.regions == (0, 5, 10) == found.cuts
    assert [(u.first, u.last) for u in found.uses] == [(0, 4), (5, 9)]
    assert found.params[1].first == 5


def test_among_equals_the_end_of_the_stay_before_wins():
    crossing = [0, 9, 9, 9, 2, 2, 2, 9, 9, 9, 0]
    found = aligned(forward((0, 3), (6, 9), num_ops=10), crossing, CHEAP_BETWEEN)
    assert found.regions == (0, 4, 10)


def test_a_wait_is_not_moved_over_long_compute():
    # Ops 4 and 5 take as long as all the others: the release stands before them, the wait behind.
    crossing = [0, 9, 9, 9, 2, 2, 3, 9, 9, 9, 0]
    us = [1.0] * 4 + [10.0] * 2 + [1.0] * 4
    found = aligned(forward((0, 3), (6, 9), num_ops=10), crossing, us)
    assert found.regions == (0, 4, 6, 10)


def test_a_wait_is_moved_over_long_compute_that_would_be_stored():
    # As before, but what op 4 makes is only stored where a cut is between it and op 5.
    crossing, fused = [0, 9, 9, 9, 2, 2, 3, 9, 9, 9, 0], [0] * 11
    us = [1.0] * 4 + [10.0] * 2 + [1.0] * 4
    fused[5] = fused[6] = 1
    found = aligned(forward((0, 3), (6, 9), num_ops=10), crossing, us, fused=fused)
    assert found.regions == (0, 4, 10)


def test_a_reduction_waits_for_the_next_cut_if_that_is_near():
    usage = forward((0, 4), (6, 9), num_ops=12, direction=Direction.BACKWARD)
    near, far = GradReady(0, 4, ((0, 2),)), GradReady(1, 9, ((0, 9),))
    usage = Usage(Direction.BACKWARD, 12, usage.uses, (near, far), params=usage.params)
    us = [10.0] * 5 + [1.0] + [10.0] * 4 + [0.1] * 2
    found = aligned(usage, [0] + [5] * 4 + [1] * 2 + [5] * 4 + [3, 0], us)
    assert found.regions == (0, 5, 12)
    assert [r.after for r in found.reductions] == [4, 11]
    assert found.reductions[0].comes == ((0, 4),)


def test_a_direction_that_gathers_nothing_is_one_region():
    found = aligned(forward(num_ops=4), [0, 1, 1, 1, 0], [1.0] * 4)
    assert found.regions == (0, 4)


def blocks_of(count, *reads, size=10):
    """An embedding (op 0), then blocks of `size` ops whose parameters are first read at `reads`."""
    firsts = [1 + size * block for block in range(count)]
    blocks = forward((0, 0), *((f, f + size - 1) for f in firsts), num_ops=1 + size * count)
    params = [ParamUse(0, 0, 0, 0)] + [
        ParamUse(group, place, first + read, first + size - 1)
        for group, first in enumerate(firsts, start=1)
        for place, read in enumerate(reads)
    ]
    us = [0.1] + [1.0] * (size * count)
    return replace(blocks, params=tuple(params)), us


def inside(usage, crossing, us):
    """The cuts that are made only where parts of a group may travel alone."""
    whole, parted = (aligned(usage, crossing, us, inside=parts) for parts in (False, True))
    assert late_params(whole) == {}
    return sorted(set(parted.regions) - set(whole.regions)), late_params(parted)


def test_the_first_and_the_last_stays_are_cut_inside_where_parts_may_travel_alone():
    usage, us = blocks_of(6, 0, 7)
    cuts, late = inside(usage, [0, *[1, 9, 9, 9, 4, 9, 9, 9, 9, 9] * 6, 0], us)
    # Once each: no parameter is read between this place and a second one.
    assert cuts == [5, 35, 45, 55]
    assert late == {(block, 1): 1 for block in (1, 4, 5, 6)}


def test_a_stay_is_cut_in_three_where_parameters_are_read_between():
    usage, us = blocks_of(1, 0, 3, 7)
    cuts, late = inside(usage, [0, 1, 9, 9, 2, *[9] * 6, 0], us)
    assert cuts == [4, 8]
    assert late == {(1, 1): 1, (1, 2): 2}


def test_a_stay_that_reads_all_its_parameters_at_once_is_not_cut_inside():
    usage, us = blocks_of(3, 0, 1)
    assert inside(usage, [0, *[5] * 30, 0], us) == ([], {})


def test_nothing_is_cut_inside_where_nothing_is_gathered():
    found = aligned(forward(num_ops=4), [0, 1, 1, 1, 0], [1.0] * 4, inside=True)
    assert found.regions == (0, 4)


def test_the_gradients_of_what_is_read_late_are_reduced_first():
    uses = (GroupUse(0, 5, 9), GroupUse(1, 0, 4))
    params = (ParamUse(1, 0, 0, 4), ParamUse(0, 1, 5, 6), ParamUse(0, 0, 8, 9))
    ready = (GradReady(1, 4, ((0, 4),)), GradReady(0, 9, ((0, 9), (1, 6), (2, 5))))
    usage = Usage(Direction.BACKWARD, 10, uses, ready, frozenset(), params)
    crossing, us = [0, *[9] * 4, 1, *[9] * 4, 0], [1.0] * 10
    assert aligned(usage, crossing, us).regions == (0, 5, 10)
    found = aligned(usage, crossing, us, late={(0, 1): 1, (0, 2): 2})
    assert found.regions == (0, 5, 6, 7, 10)
    assert dict(found.reductions[1].comes) == {0: 9, 1: 6, 2: 5}


@pytest.mark.parametrize("count", [3, 5])
def test_alike_blocks_are_cut_alike(count):
    # A block is six ops. Its group is read from the second to the fifth; little crosses between.
    blocks = [(6 * block + 1, 6 * block + 4) for block in range(count)]
    crossing = [0, *([5, 9, 9, 9, 3, 1] * count)]
    us = [0.5, 8.0, 8.0, 8.0, 8.0, 0.5] * count
    found = aligned(forward(*blocks, num_ops=6 * count), crossing, us)
    assert found.regions == tuple(range(0, 6 * count + 1, 6))


def test_crossing_bytes_count_memory_once():
    op_costs = graphs.Sketch()
    x = op_costs.input("x", 4, 4)
    a = op_costs.op(aten.relu.default, x)  # 64 bytes
    view = op_costs.op(aten.t.default, a)
    b = op_costs.op(aten.mm.default, a, view)
    c = op_costs.op(aten.add.Tensor, b, view)
    module = op_costs.done(c)
    assert len(compute_nodes(module.graph)) == 4
    # x is an input; `a` is alive until the last reader of its view, then `b` joins it.
    assert crossing_bytes(module.graph) == [0, 64, 64, 128, 0]
