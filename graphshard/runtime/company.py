"""Who else runs a root, and whether they compile alike.

In: a ballot. A rank that asks nobody (`verify="off"`) may be alone: the other ranks of its process
group may be emulated, and never say anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphshard.errors import StoreLost
from graphshard.runtime.ballot import Ballot, note, whole_of


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


def compiles(ballots: Iterable[Ballot], forward: int, uses: Sequence[str], kind: str) -> None:
    """This rank compiles a graph for a forward of this number."""
    for ballot in ballots:
        ballot.pace = ballot.pace.after(forward, " ".join(uses), kind)
        note(ballot, f"pace/{ballot.rank}", ballot.pace.text)


def keep_step(ballots: Iterable[Ballot]) -> bool:
    """All ranks have compiled the same at the same forwards, as far as anybody says. If not, each
    has batches of its own, and none can take for granted that the others do now what it does."""
    try:
        return all(
            said is None or said.decode() == ballot.pace.text
            for ballot in ballots
            for said in (ballot.store.get(f"pace/{rank}") for rank in ballot.others)
        )
    except StoreLost:
        return True
