"""Where a search begins that may compute activations again.

What is computed again makes room, and room is worth what is put in it: gathered groups, or shards
of them that nodes hold. Taken one after the other, either looks like a loss. So for each way to use
the room many numbers of activations, the cheapest for a byte first, are tried with as much of it as
fits.
"""

from __future__ import annotations

from dataclasses import replace

from graphshard.planner.choices import Choices, Cuts
from graphshard.planner.moves import (
    Move,
    lean_choices,
    node_moves,
    recompute_moves,
    still_open,
    taken,
    unmoved,
)
from graphshard.planner.prefixes import Best, best_prefix, better, filled
from graphshard.planner.score import Candidate, SearchContext, candidate


def with_room_used(context: SearchContext) -> Choices | None:
    """None if nothing may be computed again, or nothing fits. Where nodes may hold shards, the room
    is for these: a search with groups kept alone has come before."""
    again, lean = recompute_moves(context.memo), lean_choices(context.memo)
    if not again:
        return None
    saving = unmoved(lean, again)
    uncut = replace(saving, forward=Cuts(), backward=Cuts(), reduce=Cuts())
    for base in (uncut, saving):
        most = candidate(context, taken(base, again))
        if most is not None:
            uses = node_moves(context.memo) or still_open(context.memo, base)
            return _best(context, most, base, again, uses).choices
    return None


def _best(
    context: SearchContext,
    most: Candidate,
    base: Choices,
    again: list[Move],
    uses: list[Move],
) -> Candidate:
    """most: `base` with all of `again`."""

    def attempt(count: int) -> Best:
        choices = taken(base, again[:count])
        return better(candidate(context, choices), filled(context, choices, uses))

    return best_prefix(most, len(again), attempt)
