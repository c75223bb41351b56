"""Who else runs a root.

In: a ballot. A rank that asks nobody (`verify="off"`) may be alone: the other ranks of its process
group may be emulated, and never say anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.runtime.ballot import Ballot, whole_of


def is_alone(ballot: Ballot) -> bool:
    """This rank asks nobody, and no other rank has said that it runs the root.

    Alike on all ranks once a step was run: each says it before its first collective.
    """
    if not ballot.is_aside:
        return False
    places = [f"{place}/{rank}" for place in ("aside", "roll/0") for rank in ballot.others]
    return not any(ballot.store.check([key]) for key in places)


def whom_to_ask(ballots: Sequence[Ballot]) -> list[Ballot] | None:
    """All ranks at once (`whole_of`), if a mesh has them; nobody if this rank is alone."""
    whole = whole_of(ballots)
    if whole is None:
        return None if ballots else []
    return [] if is_alone(whole) else [whole]
