"""The lifetimes of tensors of a model with all of its blocks, from those of a few.

In: lifetimes in which `Repeat.captured` alike blocks stand in a row, and the first op of each of
them. Out: those of the whole row. What a block makes ends in it, or in the same block's backward,
or in a neighbour's: so it does in each of the copies. What ends farther away (a sum of all blocks)
ends there for each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphshard.offline.repeats import EARLY, Repeat
from graphshard.pricing.lifetimes import At, Lifetime, in_order
from graphshard.schedule.plan import Direction

NEAR = 1  # neighbours


@dataclass(frozen=True, slots=True)
class Row:
    """The blocks of one direction. firsts: captured block -> its first op; start, period: the first
    op of the repeated block, and how many it has."""

    firsts: Mapping[int, int]
    start: int
    period: int


@dataclass(frozen=True, slots=True)
class _Place:
    """An op by the block of the whole in which it is, counted from there; block: None before all
    blocks."""

    direction: Direction
    block: int | None
    offset: int


def unrolled_lifetimes(
    found: Sequence[Lifetime], repeat: Repeat, rows: Mapping[Direction, Row]
) -> tuple[Lifetime, ...]:
    """In the order in which their ops run."""
    return in_order(one for lifetime in found for one in _all_of(lifetime, repeat, rows))


def _all_of(
    lifetime: Lifetime, repeat: Repeat, rows: Mapping[Direction, Row]
) -> Iterator[Lifetime]:
    born, last = (_place(at, rows[at.direction]) for at in (lifetime.born, lifetime.last))
    blocks = [None if born.block is None else _whole(born.block, repeat)]
    if born.block == _repeated(born.direction):
        blocks += range(EARLY, EARLY + repeat.count - repeat.captured)
    for block in blocks:
        end = None if last.block is None else _whole(last.block, repeat)
        if block is not None and born.block is not None and last.block is not None:
            away = last.block - born.block
            end = block + away if abs(away) <= NEAR else end
        ends = replace(born, block=block), replace(last, block=end)
        yield replace(lifetime, born=_op(ends[0], repeat, rows), last=_op(ends[1], repeat, rows))


def _repeated(direction: Direction) -> int:
    """The captured block that is repeated: the one of the two that the direction reaches first."""
    return EARLY - 1 if direction is Direction.FORWARD else EARLY


def _whole(block: int, repeat: Repeat) -> int:
    """The place of a captured block among all."""
    return block if block < EARLY else block + repeat.count - repeat.captured


def _place(at: At, row: Row) -> _Place:
    blocks = sorted(row.firsts, key=lambda block: row.firsts[block])
    place = bisect_right([row.firsts[block] for block in blocks], at.op) - 1
    if place < 0:
        return _Place(at.direction, None, at.op)
    block = blocks[place]
    return _Place(at.direction, block, at.op - row.firsts[block])


def _op(place: _Place, repeat: Repeat, rows: Mapping[Direction, Row]) -> At:
    """The op of the whole."""
    row = rows[place.direction]
    added = (repeat.count - repeat.captured) * row.period
    if place.block is None:
        return At(place.direction, place.offset)
    shift = repeat.count - repeat.captured
    is_forward = place.direction is Direction.FORWARD
    if place.block < EARLY:
        first = row.firsts[place.block] + (0 if is_forward else added)
    elif place.block >= EARLY + shift:
        first = row.firsts[place.block - shift] + (added if is_forward else 0)
    else:
        late = repeat.count - repeat.late - place.block
        first = row.start + (place.block - EARLY + 1 if is_forward else late) * row.period
    return At(place.direction, first + place.offset)
