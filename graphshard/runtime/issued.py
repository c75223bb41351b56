"""The order in which this rank issues collectives, and the question to the others when it changes.

In: each collective before it is issued, and the end of each run. Afterwards the ranks have agreed
on what comes next, or all of them raise the same DivergedRanks before anything of it is sent: after
`unshard()` or another setting on one rank only, the bytes of one group would be taken for those of
another.

Where something else follows the last few collectives than the last time, it is asked about, unless
it did the same after the same runs before: a loop of micro-steps asks for a while, a step like the
last one nobody. A rank that has issued what another one asks about says so when its collective is
late; so asking works where the host itself waits (CPU), and is off elsewhere. A rank that departs
from the others unasked is seen by its neighbour, afterwards (`graphshard.runtime.neighbour`).
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from graphshard.files.information import printable
from graphshard.fsdp2.wrapped import around_unshard
from graphshard.runtime.agree import answer
from graphshard.runtime.ballot import Ballot, collect
from graphshard.runtime.calls import current_task
from graphshard.runtime.live import LiveGroup, Root
from graphshard.runtime.neighbour import Neighbour, Passed, other_order
from graphshard.runtime.waiting import NamedCollective, naming

SPAN = 3  # so many collectives before one say what comes next
KEPT = 1024  # collectives that this rank can still tell of
HISTORY = 16  # runs before a turn that have to be the same, two to a micro-step
MOST_TURNS = 4096  # a loop that never repeats itself asks again and again


class Trail:
    """What this rank has issued on one mesh of an FSDP root.

    asks: where the host itself waits. count: collectives and ends of runs so far, the same on all
    ranks.
    """

    def __init__(self, ballot: Ballot, *, asks: bool) -> None:
        self._ballot, self._asks = ballot, asks
        self._neighbour = Neighbour(ballot)
        self.count = 0
        self._digest = 0
        self._last: tuple[int, ...] = (0,) * SPAN
        self._recent: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._codes: dict[Any, int] = {}
        self._texts: dict[int, str] = {}
        # By the collectives before: what came next the last time.
        self._next: dict[tuple[int, ...], int] = {}
        self._run, self._history = 0, (0,) * HISTORY  # digests of this run so far, and of the last
        self._turns: set[tuple[int, ...]] = set()
        self._runs: set[tuple[str, bool]] = set()
        self._said: list[int] = []
        ballot.store.set(f"asks/{ballot.rank}", "-1")

    def note(self, key: Any, text: Callable[[], str]) -> None:
        """`key` is issued next. Raises DivergedRanks if another rank issues something else.

        key: equal for equal collectives, of objects that live as long as the model.
        """
        if self._ballot.running is None:  # `verify="off"`, or nothing was compiled yet
            return
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = self._code(text())
        if (usual := self._next.get(self._last)) != code:
            self._turn(usual, code)
        self._recent.append((self._digest, code))
        self._digest = hash((self._digest, code))  # of ints: the same in all processes
        self._run = hash((self._run, code))
        self._last = (*self._last[1:], code)
        self.count += 1

    def end(self, is_backward: bool) -> None:
        """A run is over."""
        direction = "backward" if is_backward else "forward"
        self.note(direction, lambda: f"the end of a {direction}")
        if self._ballot.running is not None:
            run = (self._ballot.running.name, is_backward)
            if not is_backward and (run in self._runs or run[0] != self._ballot.voted):
                self._ballot.voted = ""
            self._runs.add(run)
            self._history = (*self._history[1:], self._run)
            self._run = 0
            self._neighbour.look(self._passed)

    def _passed(self) -> Passed:
        last = tuple((digest, self._texts[code]) for digest, code in self._recent)
        return Passed(self.count, self._digest, last)

    def _code(self, text: str) -> int:
        text = printable(text)  # names may hold what no encoding has
        code = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        self._texts[code] = text
        return code

    # -- the question ------------------------------------------------------------------------------

    def _turn(self, usual: int | None, code: int) -> None:
        """What comes next is not what came the last time."""
        turn = (*self._history, self._run, code)
        if self._asks and (usual is None or turn not in self._turns):
            self._meet(code)
        if len(self._turns) == MOST_TURNS:
            self._turns.clear()
        self._turns.add(turn)
        self._next[self._last] = code

    def _meet(self, code: int) -> None:
        """Something new comes next: hear what it is on the other ranks.

        The first run of a plan asks nobody where the ranks have just voted on it, since all of them
        run it now; it leaves its word for those that ask. Where this rank compiled a graph without
        a vote, as its collectives had been agreed on before, others may run another graph.
        """
        ballot, number = self._ballot, self.count
        self._say(number, self._digest, code)
        assert ballot.running is not None
        run = (ballot.running.name, current_task() >= 0)
        if run[0] == ballot.voted and run not in self._runs:
            return
        ballot.store.set(f"asks/{ballot.rank}", str(number))
        keys = {rank: _key(number, rank) for rank in ballot.ranks}
        what = f"collective {number}, {self._texts[code]}"
        look = partial(self._look, number)
        self._compare(number, collect(ballot, keys, what, ballot.limit_s, look))
        self._forget(number)

    def _look(self, number: int) -> None:
        """While ranks are missing: those that are here may differ already."""
        answer([self._ballot])
        self._compare(number, self._said_by(number))

    def answer(self) -> None:
        """A collective of this rank is late: tell the ranks that ask what this one has issued."""
        ballot, first = self._ballot, self.count - len(self._recent)
        if ballot.running is None:
            return
        self._neighbour.compare(self._passed())
        keys = [f"asks/{rank}" for rank in ballot.others]
        if not ballot.store.check(keys):
            return
        for number in sorted(set(map(int, ballot.store.multi_get(keys)))):
            if first <= number < self.count and number not in self._said:
                self._say(number, *self._recent[number - first])
                self._compare(number, self._said_by(number))

    def _say(self, number: int, digest: int, code: int) -> None:
        self._said.append(number)
        said = json.dumps([digest, self._texts[code]])
        self._ballot.store.set(_key(number, self._ballot.rank), said)

    def _said_by(self, number: int) -> dict[int, str]:
        ballot = self._ballot
        said = {rank: ballot.store.get(_key(number, rank)) for rank in ballot.ranks}
        return {rank: text.decode() for rank, text in said.items() if text is not None}

    def _compare(self, number: int, said: dict[int, str]) -> None:
        if len(set(said.values())) < 2:
            return
        raise other_order(number, {rank: json.loads(text)[1] for rank, text in said.items()})

    def _forget(self, number: int) -> None:
        """All ranks have passed what was asked before `number`: nobody reads that any more."""
        for old in [n for n in self._said if n < number]:
            self._ballot.store.delete_key(_key(old, self._ballot.rank))
            self._said.remove(old)


def _key(number: int, rank: int) -> str:
    return f"next/{number}/{rank}"


# -- who issues ------------------------------------------------------------------------------------


def follow(root: Root) -> None:
    """From now on the ranks of `root` compare what they issue, FSDP2's own gathers included."""
    for ballot in root.ballots:
        lives = [live for live in root.groups if live.fqn in ballot.groups]
        trail = Trail(ballot, asks=all(live.fsdp.device.type == "cpu" for live in lives))
        ballot.also = trail.answer
        for live in lives:
            live.trail = trail
            gather = _unshard(live)
            around_unshard(live.fsdp, partial(_issued_by_fsdp2, gather), partial(naming, gather))


def _unshard(live: LiveGroup) -> NamedCollective:
    names = [live.fqn or "(root)"]
    process_group = live.fsdp.gather_process_group
    return NamedCollective("all-gather (unshard)", live, lambda: names, process_group)


@contextmanager
def _issued_by_fsdp2(gather: NamedCollective) -> Iterator[None]:
    live = gather.live
    note(live, ("FSDP2", live.number), lambda: f"all-gather of {live.fqn} by FSDP2 (unshard)")
    with naming(gather):
        yield


def note(live: LiveGroup, key: Any, text: Callable[[], str]) -> None:
    """A collective of `live`'s mesh is issued next: see `Trail.note`."""
    if live.trail is not None:
        live.trail.note(key, text)


def ended(lives: Iterable[LiveGroup], *, is_backward: bool) -> None:
    """A run that used these groups is over."""
    for trail in dict.fromkeys([live.trail for live in lives]):
        if trail is not None:
            trail.end(is_backward)
