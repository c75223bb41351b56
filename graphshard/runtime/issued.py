"""The order in which this rank issues collectives, and the question to the others when it changes.

In: each collective before it is issued, and the end of each run. Afterwards the ranks have agreed
on what comes next, or all of them raise the same DivergedRanks before anything of it is sent: after
`unshard()` or another setting on one rank only, the bytes of one group would be taken for those of
another.

What follows the last few collectives is asked about once. A step like earlier ones asks nobody. A
rank that has issued what another one asks about says so when its collective is late; so this works
where the host itself waits (CPU), and is off elsewhere. What it does not see: a rank that changes
over between two orders on which the ranks have agreed, while the others do not.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from graphshard.errors import DivergedRanks
from graphshard.files.information import printable
from graphshard.fsdp2.settings import before_unshard
from graphshard.runtime.agree import answer
from graphshard.runtime.ballot import Ballot, collect
from graphshard.runtime.calls import current_task
from graphshard.runtime.live import LiveGroup, Root

SPAN = 3  # so many collectives before one say what comes next
KEPT = 1024  # collectives that this rank can still tell of


class Trail:
    """What this rank has issued on one mesh of an FSDP root.

    count: collectives and ends of runs so far, the same on all ranks.
    """

    def __init__(self, ballot: Ballot) -> None:
        self._ballot = ballot
        self.count = 0
        self._digest = 0
        self._last: tuple[int, ...] = (0,) * SPAN
        self._recent: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._codes: dict[Any, int] = {}
        self._texts: dict[int, str] = {}
        self._known: set[tuple[int, ...]] = set()
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
        step = (*self._last, code)
        if step not in self._known:
            self._meet(code)
            self._known.add(step)
        self._recent.append((self._digest, code))
        self._digest = hash((self._digest, code))  # of ints: the same in all processes
        self._last = step[1:]
        self.count += 1

    def end(self, is_backward: bool) -> None:
        """A run is over."""
        direction = "backward" if is_backward else "forward"
        self.note(direction, lambda: f"the end of a {direction}")
        if self._ballot.running is not None:
            self._runs.add((self._ballot.running.name, is_backward))

    def _code(self, text: str) -> int:
        text = printable(text)  # names may hold what no encoding has
        code = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        self._texts[code] = text
        return code

    # -- the question ------------------------------------------------------------------------------

    def _meet(self, code: int) -> None:
        """Something new comes next: hear what it is on the other ranks.

        The first run of a plan asks nobody, since the ranks agreed on the plan; it leaves its word
        for those that ask.
        """
        ballot, number = self._ballot, self.count
        self._say(number, self._digest, code)
        assert ballot.running is not None
        if (ballot.running.name, current_task() >= 0) not in self._runs:
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
        keys = [f"asks/{rank}" for rank in ballot.others]
        if ballot.running is None or not ballot.store.check(keys):
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
        keys = {rank: _key(number, rank) for rank in ballot.ranks}
        return {r: ballot.store.get(k).decode() for r, k in keys.items() if ballot.store.check([k])}

    def _compare(self, number: int, said: dict[int, str]) -> None:
        if len(set(said.values())) < 2:
            return
        rows = {rank: json.loads(text) for rank, text in said.items()}
        listed = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in rows.items())
        alike = len({text for _, text in rows.values()}) == 1
        before = ", after others that differed" if alike else ""
        raise DivergedRanks(
            "GS702",
            f"the ranks issue different collectives: collective {number} is {listed}{before}; was "
            "unshard() or a setting such as set_reshard_after_forward called on one rank only?",
        )

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
        lives = [live for live in root.groups.values() if live.fqn in ballot.groups]
        if any(live.fsdp.device.type != "cpu" for live in lives):
            continue
        trail = Trail(ballot)
        ballot.also = trail.answer
        for live in lives:
            live.trail = trail
            before_unshard(live.fsdp, partial(_gathered_by_fsdp2, live))


def _gathered_by_fsdp2(live: LiveGroup) -> None:
    note(live, ("FSDP2", live.number), lambda: f"all-gather of {live.fqn} by FSDP2 (unshard)")


def note(live: LiveGroup, key: Any, text: Callable[[], str]) -> None:
    """A collective of `live`'s mesh is issued next: see `Trail.note`."""
    if live.trail is not None:
        live.trail.note(key, text)


def ended(lives: Iterable[LiveGroup], *, is_backward: bool) -> None:
    """A run that used these groups is over."""
    for trail in dict.fromkeys([live.trail for live in lives]):
        if trail is not None:
            trail.end(is_backward)
