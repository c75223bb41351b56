"""The rules of torch's CUDA caching allocator, one by one, and what holds for any program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.cost.allocator import LARGE_SEGMENT, MIB, ROUND, SMALL_SEGMENT, Allocator


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, SMALL_SEGMENT),
        (MIB, SMALL_SEGMENT),
        (MIB + 1, LARGE_SEGMENT),
        (10 * MIB - ROUND, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_what_a_first_allocation_reserves(size, segment):
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved_bytes == segment


def test_a_segment_serves_until_it_is_full():
    allocator = Allocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == LARGE_SEGMENT
    allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 2 * LARGE_SEGMENT


def test_small_and_large_sizes_and_streams_share_nothing():
    allocator = Allocator()
    allocator.free(allocator.allocate(40 * MIB))
    for size, stream, reserved in ((1, 0, 42), (40 * MIB, 1, 82), (40 * MIB, 0, 82)):
        allocator.allocate(size, stream)
        assert allocator.reserved_bytes == reserved * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = Allocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(30 * MIB)
    allocator.allocate(64 * MIB)  # still whole
    assert allocator.reserved_bytes == 96 * MIB


def test_what_is_left_of_a_large_block_serves_if_it_is_more_than_a_small_one():
    allocator = Allocator()
    allocator.free(allocator.allocate(32 * MIB))
    allocator.allocate(31 * MIB)  # 1 MiB is left, and lost
    allocator.allocate(ROUND)
    assert allocator.reserved_bytes == 34 * MIB


def test_what_a_state_takes_of_a_large_block_splits_it():
    """Why a step after the first optimizer step reserves more than the first one."""
    allocator = Allocator()
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(2 * MIB)
    allocator.allocate(64 * MIB)
    assert allocator.reserved_bytes == 128 * MIB


def test_a_full_device_gives_back_what_is_not_in_use():
    allocator = Allocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    in_use = allocator.allocate(30 * MIB)  # half of the 60
    allocator.allocate(60 * MIB, stream=1)  # nothing to give back
    assert (allocator.emptied, allocator.reserved_bytes) == (1, 120 * MIB)
    allocator.free(in_use)
    allocator.allocate(40 * MIB, stream=2)
    assert (allocator.emptied, allocator.reserved_bytes) == (2, 100 * MIB)
    assert allocator.peak_bytes == 120 * MIB


sizes = st.one_of(st.integers(1, MIB), st.integers(MIB, 64 * MIB))


@given(st.lists(st.tuples(sizes, st.integers(0, 2), st.integers(0, 30)), max_size=40))
def test_any_program(program):
    """stay: after so many more allocations the block is freed."""
    allocator, alive, in_use, most = Allocator(), [], 0, 0
    for now, (size, stream, stay) in enumerate(program):
        for end, own, block in [one for one in alive if one[0] <= now]:
            allocator.free(block)
            in_use -= own
            alive.remove((end, own, block))
        block = allocator.allocate(size, stream)
        assert block.size >= size
        assert not any(_overlap(block, other) for _, _, other in alive)
        alive.append((now + stay, size, block))
        in_use += size
        most = max(most, in_use)
    assert allocator.reserved_bytes >= most
    reserved = allocator.reserved_bytes
    for _, _, block in alive:
        allocator.free(block)
    # All is one block for each segment again: the largest of the program finds room.
    if program:
        size, stream, _ = max(program)
        allocator.allocate(size, stream)
    assert allocator.reserved_bytes == reserved


def _overlap(one, other):
    return one.address < other.address + other.size and other.address < one.address + one.size
