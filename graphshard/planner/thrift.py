"""Memory that buys next to nothing is given back.

In comes the plan that the search found, out comes one that takes less memory and is hardly slower.
Given back is what the plan takes for communication: what stays gathered, and gathers and reductions
in flight. What is computed again, or copied to the host, stays as it is, since that takes time of
another kind. The knee is found by halves: at each limit between the least and what the plan takes,
as much stays gathered as fits, the densest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphshard.planner.choices import Choices
from graphshard.planner.compare import placed_as
from graphshard.planner.moves import Move, stays, taken, unmoved
from graphshard.planner.score import Candidate, SearchContext, candidate, fits
from graphshard.planner.search import tune

# Less of the peak is not worth another plan.
LEAST = 0.02
TRIES = 5

# A candidate of a context, just in time.
Finish: TypeAlias = Callable[[SearchContext, Candidate], Candidate]


@dataclass(frozen=True, slots=True)
class _Knee:
    """base: the choices with nothing gathered for longer than it must; stays: what may be."""

    context: SearchContext
    base: Choices
    stays: Sequence[Move]
    finish: Finish

    def within(self, limit_bytes: int) -> Candidate | None:
        """The plan with as much of `stays` as fits; None if nothing fits."""
        context = SearchContext(
            self.context.memo, limit_bytes, policies=dict(self.context.policies)
        )
        if not fits(context, self.base):
            return None
        most, fails = 0, len(self.stays) + 1
        count = len(self.stays)
        while most < count:
            if fits(context, taken(self.base, self.stays[:count])):
                most = count
            else:
                fails = count
            count = (most + fails) // 2
        found = candidate(context, taken(self.base, self.stays[:most]))
        self.context.effort += context.effort
        return None if found is None else self.finish(context, found)


def thrifty(
    context: SearchContext, best: Candidate, start: Choices, most_us: float, finish: Finish
) -> Candidate | None:
    """The plan with the least memory that was found to take at most `most_us`; None if none takes
    LEAST of the peak less than `best`. start: choices of which less is taken, those of `best` or
    others."""
    moves = stays(context.memo, start)
    base = unmoved(start, moves)
    least_bytes, enough_bytes = placed_as(context.memo, base).peak_bytes, best.peak_bytes
    goal_bytes = (1 - LEAST) * best.peak_bytes
    if least_bytes > goal_bytes:
        return None
    tune(context, start)
    knee, found = _Knee(context, base, moves, finish), None
    limit_bytes = least_bytes
    for _ in range(TRIES + 1):
        other = knee.within(limit_bytes)
        if other is not None and other.us <= most_us:
            found, enough_bytes = other, min(other.peak_bytes, limit_bytes)
        else:
            least_bytes = limit_bytes
        limit_bytes = (least_bytes + enough_bytes) // 2
        if limit_bytes > goal_bytes or enough_bytes - least_bytes <= LEAST * best.peak_bytes:
            break
    context.policies.clear()
    context.scores.clear()
    return found if found is not None and found.peak_bytes <= goal_bytes else None
