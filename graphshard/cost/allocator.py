"""What torch's CUDA caching allocator reserves for a sequence of allocations.

In: allocations and frees in the order of a program. Out: bytes reserved. The rules are those of
c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings: sizes are rounded to
ROUND; a block serves only the stream that asked for it first, and only small or only large sizes;
the smallest free block that is large enough is taken, and split if enough is left; neighbours that
are free become one block; what no block can serve takes a new segment; where the device has
no room for it, all segments in which nothing is in use are given back first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUND = 512
# Sizes up to SMALL come from segments of SMALL_SEGMENT, and are split to any size.
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
# Larger ones below OWN_SEGMENT from segments of LARGE_SEGMENT; from there on each has a segment of
# its own, rounded to SEGMENT_ROUND. Large blocks are split only if more than SMALL is left.
OWN_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUND = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment. address orders free blocks of one size, as torch does by pointer."""

    pool: tuple[int, bool]
    address: int
    size: int
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass(slots=True)
class Allocator:
    """reserved_bytes: of all segments; peak_bytes: the most that they were. capacity_bytes: of the
    device; None: as much as it takes. emptied: how often it was full, which stops the device. What
    does not fit even then is counted as if it did."""

    capacity_bytes: int | None = None
    reserved_bytes: int = 0
    peak_bytes: int = 0
    emptied: int = 0
    _end: int = 0  # the next segment's address
    _free: dict[tuple[int, bool], list[tuple[int, int]]] = field(default_factory=dict)
    _blocks: dict[int, Block] = field(default_factory=dict)  # by address

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """A block for `size_bytes` that work on `stream` asks for."""
        size = max(ROUND, -(-size_bytes // ROUND) * ROUND)
        pool = stream, size <= SMALL
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._blocks[free.pop(place)[1]]
            block.is_free = False
        else:
            block = self._segment(pool, size)
        if block.size - size >= (ROUND if pool[1] else SMALL + 1):
            self._split(block, size)
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[other.pool].remove((other.size, other.address))
                block = _joined(block, other) if other is block.after else _joined(other, block)
                self._blocks[block.address] = block
        block.is_free = True
        insort(self._free[block.pool], (block.size, block.address))

    def _segment(self, pool: tuple[int, bool], size: int) -> Block:
        if pool[1]:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        if self.capacity_bytes is not None and self.reserved_bytes + whole > self.capacity_bytes:
            self._empty()
        block = self._blocks[self._end] = Block(pool, self._end, whole)
        self._end += whole
        self.reserved_bytes += whole
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return block

    def _empty(self) -> None:
        """Give back every segment that is one free block."""
        self.emptied += 1
        for free in self._free.values():
            blocks = [self._blocks[address] for _, address in free]
            whole = [block for block in blocks if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size for block in whole)
            free[:] = [
                (block.size, block.address)
                for block in blocks
                if block.before is not None or block.after is not None
            ]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.pool, block.address + size, block.size - size, block, block.after, is_free=True
        )
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._blocks[rest.address] = rest
        insort(self._free[rest.pool], (rest.size, rest.address))


def _joined(first: Block, second: Block) -> Block:
    """Two neighbours as one, which is the first."""
    first.size, first.after = first.size + second.size, second.after
    if second.after is not None:
        second.after.before = first
    first.is_free = False
    return first
