"""Which groups to keep, how to cut buckets, what to recompute: the search over `Choices`.

Two kinds of step, both judged by placing everything anew: *prefixes* (order a family of moves by
what a byte or a microsecond of it buys, and try its first 1, 2, 4, ... moves), which find the
scale of a decision in few tries, and *flips* of single moves, which settle the rest. The search
is bounded by `SearchContext.effort`, so equal problems get equal plans on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import attrgetter

from graphshard.planner.choices import Choices
from graphshard.planner.moves import (
    Move,
    What,
    families,
    lean_choices,
    moves,
    still_open,
    taken,
    unmoved,
)
from graphshard.planner.prefixes import Best, best_prefix, better, filled
from graphshard.planner.score import (
    Candidate,
    SearchContext,
    candidate,
    most_frugal,
    placed_by_each,
)
from graphshard.planner.starts import with_room_used

# How many events the search may play. What only asks whether choices fit plays none.
LEAST_EFFORT = 150_000
EFFORT_PER_EVENT = 120
POLICIES = 2
PAIRS = 16  # so many moves at most are flipped in pairs
# Of the step: what a reduction that lets others go first has to gain. Ranks with other batches run
# other graphs of one model side by side, and can as long as the order of collectives is one.
REORDER_WORTH = 0.01


def search(context: SearchContext, starts: Sequence[Choices]) -> Best:
    """The best candidate found from `starts`, or None if none of them can be made to fit."""
    begun = _begun(context, starts)
    return _settled(context, min(begun, key=attrgetter("rank"))) if begun else None


def search_from_each(context: SearchContext, starts: Sequence[Choices]) -> list[Candidate]:
    """As `search`, and from where the room is used: with shards that nodes hold this is far from
    what other starts come to."""
    return [_settled(context, one) for one in _begun(context, starts)]


def _begun(context: SearchContext, starts: Sequence[Choices]) -> list[Candidate]:
    """The best of `starts`, and what uses the room; the first alone if it is good enough."""
    best: Best = None
    for start in (*starts, lean_choices(context.memo)):
        best = better(best, candidate(context, start))
        if best is not None and best.us <= context.enough_us:
            return [best]
    if best is None:
        return []
    tune(context, best.choices)
    begun = [best]
    room_used = with_room_used(context)
    if room_used is not None:
        begun.append(candidate(context, room_used) or best)
    return begun


def _settled(context: SearchContext, best: Candidate) -> Candidate:
    """`best`, changed step by step until nothing helps, or the effort for that is spent."""
    if best.us <= context.enough_us:
        return best
    limit = context.effort + effort_limit(context)
    tune(context, best.choices)
    before = None
    while best is not before and _goes_on(context, best, limit):
        before = best
        best = _prefixes(context, best, limit)
        best = _flips(context, best, limit)
        if best is before:
            best = _pairs(context, best, limit)
    context.policies.clear()
    context.scores.clear()
    found = better(best, candidate(context, best.choices))
    assert found is not None
    return found


def _goes_on(context: SearchContext, best: Candidate, limit: int) -> bool:
    return context.effort < limit and best.us > context.enough_us


def effort_limit(context: SearchContext) -> int:
    """Work that may be done from the best start on: constant for small problems, then in proportion
    to size."""
    problem = context.problem
    regions = len(problem.forward) + len(problem.backward)
    parts = sum(len(g.parts) for g in problem.groups)
    num_options = len(problem.recompute) + len(problem.offload_options)
    return max(LEAST_EFFORT, EFFORT_PER_EVENT * (regions + 8 * parts + 2 * num_options))


def tune(context: SearchContext, choices: Choices) -> None:
    """Search with the few policies that serve `choices` best, and with the most frugal one: other
    choices, which compute less again, may fit with no other."""
    context.policies.clear()
    for direction in context.problem.directions:
        found = list(placed_by_each(context, choices, direction))
        found.sort(key=lambda row: (row[1].us, row[1].peak_bytes))
        chosen = [policy for policy, _ in found[:POLICIES]]
        chosen.append(most_frugal(context.problem, direction))
        context.policies[direction] = tuple(dict.fromkeys(chosen))
    context.scores.clear()


def _prefixes(context: SearchContext, best: Candidate, limit: int) -> Candidate:
    """For each family of moves: as if none of it were taken, then its first few, then more."""
    for family in families(context.memo):
        if not _goes_on(context, best, limit):
            break
        base = unmoved(best.choices, family)

        def attempt(count: int, base: Choices = base, family: Sequence[Move] = family) -> Best:
            choices = taken(base, family[:count])
            found = candidate(context, choices)
            if family[0].what not in (What.RECOMPUTE, What.OFFLOAD):
                return found
            # Room gains nothing by itself: it has to be used.
            return better(found, filled(context, choices, still_open(context.memo, choices)))

        best = best_prefix(best, len(family), attempt)
    return best


def _gains(found: Candidate, best: Candidate) -> bool:
    if set(found.choices.delays) - set(best.choices.delays):
        return found.us < (1 - REORDER_WORTH) * best.us
    return found.rank < best.rank


def _flips(context: SearchContext, best: Candidate, limit: int) -> Candidate:
    """Single moves, each taken at once if it helps, until none does."""
    order = moves(context.memo)
    quiet = 0
    while order and quiet < len(order):
        for move in order:
            if quiet >= len(order) or not _goes_on(context, best, limit):
                return best
            found = candidate(context, taken(best.choices, [move]))
            if found is not None and _gains(found, best):
                best, quiet = found, 0
            else:
                quiet += 1
    return best


def _pairs(context: SearchContext, best: Candidate, limit: int) -> Candidate:
    """Two moves at once: one that pays for the other. Small problems only."""
    order = moves(context.memo)
    if len(order) > PAIRS:
        return best
    for pair in combinations(order, 2):
        if not _goes_on(context, best, limit):
            break
        found = candidate(context, taken(best.choices, pair))
        if found is not None and _gains(found, best):
            return found
    return best
