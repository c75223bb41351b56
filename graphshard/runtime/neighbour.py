"""What this rank has issued against what the next rank of the mesh has, in the background.

In: the last collectives of this rank, at the end of a run. Out: nothing, or DivergedRanks (GS702)
at the end of a later one. Every rank says from time to time, through the job's store, how far it is
and what its order hashes to; it looks at what the next rank said last, and waits for nobody. Where
all neighbours agree, all ranks do, and each look costs the same in a mesh of any size.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graphshard.errors import DivergedRanks, StoreLost
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.limited import Task, begin

logger = logging.getLogger(__name__)

EVERY_S, PER_RANK_S = 1.0, 0.01  # between two looks; the store serves all ranks
SHOWN = 64  # collectives that a rank tells of


@dataclass(frozen=True, slots=True)
class Passed:
    """What one rank has issued. count: collectives so far. digest: of their order. last: of the
    last ones, the digest before each and what it is."""

    count: int
    digest: int
    last: tuple[tuple[int, str], ...]

    @property
    def first(self) -> int:
        """Number of the first collective that `last` has."""
        return self.count - len(self.last)

    def digest_before(self, number: int) -> int | None:
        """None if that was too long ago, or is yet to come."""
        if number == self.count:
            return self.digest
        return self.last[number - self.first][0] if self.first <= number < self.count else None


def parting(own: Passed, other: Passed) -> int | None:
    """Number of the first collective that is known to differ, or that comes after such a one."""
    number = min(own.count, other.count)
    digests = own.digest_before(number), other.digest_before(number)
    if None in digests or digests[0] == digests[1]:
        return None
    first = max(own.first, other.first)
    for at in range(first, number):
        if own.last[at - own.first] != other.last[at - other.first]:
            return at
    return number


class Neighbour:
    """The next rank of a mesh, as this one sees it."""

    def __init__(self, ballot: Ballot) -> None:
        ranks = ballot.ranks
        self._ballot = ballot
        self._rank = ranks[(ranks.index(ballot.rank) + 1) % len(ranks)]
        self._every_s = EVERY_S + PER_RANK_S * len(ranks)
        self._due = 0.0
        self._task: Task | None = None

    def look(self, passed: Callable[[], Passed]) -> None:
        """At the end of a run: raises what the last comparison found, and begins the next one."""
        if self._task is not None:
            if not self._task.is_over_within(0.0):
                return
            self._task = None
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._every_s
            self._task = begin(partial(self.compare, passed()), answered_at_once=True)

    def compare(self, own: Passed) -> None:
        """Raises DivergedRanks (GS702) if the next rank has issued something else."""
        store, rank = self._ballot.store, self._ballot.rank
        try:
            store.set(f"passed/{rank}", _to_text(own))
            said = store.get(f"passed/{self._rank}")
        except StoreLost as error:  # whoever needs it says so
            self._due = float("inf")
            logger.debug("rank %d: %s", rank, error)
            return
        if said is None:  # it has not come so far, or has dropped its model
            return
        other = _from_text(said.decode())
        number = parting(own, other)
        if number is not None:
            raise other_order(number, {rank: _name(own, number), self._rank: _name(other, number)})


def _to_text(passed: Passed) -> str:
    return json.dumps([passed.count, passed.digest, passed.last[-SHOWN:]])


def _from_text(text: str) -> Passed:
    count, digest, last = json.loads(text)
    return Passed(count, digest, tuple((before, what) for before, what in last))


def _name(passed: Passed, number: int) -> str:
    at = number - passed.first
    return passed.last[at][1] if 0 <= at < len(passed.last) else "not told"


def other_order(number: int, by_rank: dict[int, str]) -> DivergedRanks:
    """GS702. by_rank: what collective `number` is."""
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in by_rank.items())
    alike = len(set(by_rank.values())) == 1
    before = ", after others that differed" if alike else ""
    return DivergedRanks(
        "GS702",
        f"the ranks issue different collectives: collective {number} is {listed}{before}; was "
        "unshard() or a setting such as set_reshard_after_forward called on one rank only?",
    )
