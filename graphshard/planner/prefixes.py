"""The best number of moves to take from a list of them, in its order, by placing each anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from graphshard.planner.choices import Choices
from graphshard.planner.moves import Move, taken
from graphshard.planner.score import Candidate, SearchContext, candidate, fits

Best: TypeAlias = Candidate | None
# More of them is not always faster: what fits with fewer is tried, too.
TRIED = 2


def better(one: Best, other: Best) -> Best:
    """The one with the smaller rank; `one` where they are equal."""
    if one is None or other is None:
        return other if one is None else one
    return other if other.rank < one.rank else one


def filled(context: SearchContext, choices: Choices, moves: Sequence[Move]) -> Best:
    """The best of `choices` with as many of `moves` as fit, found by halves: the TRIED largest."""
    most, fails = 0, len(moves) + 1
    count = len(moves)
    fitting = []
    while most < count < fails:
        if fits(context, taken(choices, moves[:count])):
            most = count
            fitting.append(count)
        else:
            fails = count
        count = (most + fails) // 2
    best: Best = None
    for count in fitting[-TRIED:]:
        best = better(best, candidate(context, taken(choices, moves[:count])))
    return best


def best_prefix(best: Candidate, longest: int, attempt: Callable[[int], Best]) -> Candidate:
    """The best of `best` and what `attempt` finds: doubling lengths, then halving steps around the
    best one."""
    tried: dict[int, Best] = {}
    lengths = [0, *_doubling(longest), longest]
    center, step = 0, max(1, longest // 2)
    while lengths:
        for length in lengths:
            if length not in tried:
                tried[length] = attempt(length)
        fitting = {n: c for n, c in tried.items() if c is not None}
        if not fitting:
            return best
        center = min(fitting, key=lambda n: (fitting[n].rank, n))
        around = [center - step, center + step] if step else []
        lengths = [n for n in around if 0 <= n <= longest]
        step //= 2
    found = better(best, tried[center])
    assert found is not None
    return found


def _doubling(longest: int) -> Iterator[int]:
    length = 1
    while length < longest:
        yield length
        length *= 2
