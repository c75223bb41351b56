"""Ranks that ask nobody: `verify="off"`, and GRAPHSHARD_DISABLE.

In: a root's ballots. Out: nothing, or DivergedRanks (GS708) if another rank does ask. Such a rank
says so and looks at what the others said, but does not wait for them as they do
(`graphshard.runtime.roll`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence

from graphshard.errors import StoreLost
from graphshard.runtime.ballot import LEAVE_S, POLL_S, Ballot, Terms, note, stay_until_read
from graphshard.runtime.votes import other_terms

logger = logging.getLogger(__name__)


def stand_aside(ballots: Sequence[Ballot], terms: Terms, wait_s: float) -> None:
    """Say that this rank runs the root without asking anybody, and look at what the others said.

    Raises DivergedRanks (GS708) if one of them does not stand aside as well. wait_s: how long the
    others are waited for; one that comes later raises alone.
    """
    for ballot in ballots:
        if not ballot.is_open:
            said = {"terms": dict(terms), "groups": ""}
            note(ballot, f"aside/{ballot.rank}", json.dumps(said))
            ballot.is_open = ballot.is_aside = True
            _glance(ballot, wait_s)


def look_again(ballots: Iterable[Ballot]) -> None:
    """Called while a collective is late, on a rank that stood aside."""
    for ballot in ballots:
        if ballot.is_aside:
            _glance(ballot, 0.0)


def _glance(ballot: Ballot, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    try:
        found = _terms_so_far(ballot)
        while len(found) < len(ballot.ranks) and time.monotonic() < until:
            time.sleep(POLL_S[1])
            found = _terms_so_far(ballot)
        if other_terms(found) is None:
            return
        until = time.monotonic() + LEAVE_S  # the others name all ranks
        while len(found) < len(ballot.ranks) and time.monotonic() < until:
            time.sleep(POLL_S[1])
            found = _terms_so_far(ballot)
    except StoreLost as error:  # nobody is asked, so nobody is missed
        logger.debug("rank %d: the store is gone: %s", ballot.rank, error)
        return
    stay_until_read([ballot], "roll/0")
    differing = other_terms(found)
    assert differing is not None
    raise differing


def _terms_so_far(ballot: Ballot) -> dict[int, Terms]:
    found: dict[int, Terms] = {}
    for rank in ballot.ranks:
        for key in (f"aside/{rank}", f"roll/0/{rank}"):
            if rank not in found and (said := ballot.store.get(key)) is not None:
                found[rank] = json.loads(said)["terms"]
    return found
