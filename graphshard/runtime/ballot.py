"""Where the ranks of one mesh leave what they say, in the job's store, and how the others read it.

In: the groups of an FSDP root by mesh. Out: one `Ballot` per mesh. All that fails here fails as
DivergedRanks (GS704), also when the store itself is gone, since the rank that hosts it may leave.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from graphshard.errors import DivergedRanks, StoreLost
from graphshard.runtime.job_store import JobStore, job_store
from graphshard.runtime.leftovers import OwnStore, take_away
from graphshard.runtime.pace import Pace
from graphshard.schedule.group_signature import Groups, GroupSignature
from graphshard.schedule.plan import Plan

logger = logging.getLogger(__name__)

SLOW_S = 15.0  # then the ranks that are missing are named in the log
LEAVE_S = 5.0  # that a rank with an error stays, for others to read it
POLL_S = (0.001, 0.05)  # first and longest pause between two looks at the store

# Options by name: those that every rank must have alike.
Terms: TypeAlias = Mapping[str, object]


@dataclass(eq=False, slots=True)
class Ballot:
    """What the ranks of one mesh have agreed on about one FSDP root.

    store: of this mesh's questions. ranks: of the mesh; rank: this one. groups: FQNs of the root's
    groups on this mesh. limit_s: how long a rank waits for the others' answers.

    slot: the number of the next question. calls: forward calls so far (`verify="every"`). profiles:
    blocks of `graphshard.profile` so far. agreed: plans, with the options of the ranks then.
    running, terms: plan and options of the last call. voted: name of the plan that all ranks have
    just voted on, until the forward after the next one.

    name: in `shared`, the job's store. signature: reads what FSDP2 would send for the groups now.
    group_limit_s: time limit of the groups' collectives. is_open: the ranks have begun to run this
    root together (`graphshard.runtime.roll`). is_aside: this one without asking. is_lost: the store
    did not answer. costs: what its plans are made with, once that was measured. pace: what this
    rank has compiled so far (`graphshard.runtime.pace`). also: what else is
    answered while a collective is late (`graphshard.runtime.issued`).
    """

    store: OwnStore
    rank: int
    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    limit_s: float
    slot: int = 0
    calls: int = 0
    profiles: int = 0
    agreed: list[tuple[Plan, Terms]] = field(default_factory=list)
    running: Plan | None = None
    terms: Terms = field(default_factory=dict)
    voted: str = ""
    name: str = ""
    shared: JobStore | None = None
    signature: Callable[[], Groups] = tuple
    group_limit_s: float = float("inf")
    is_open: bool = False
    is_aside: bool = False
    is_lost: bool = False
    costs: str = ""
    pace: Pace = field(default_factory=Pace)
    also: Callable[[], None] | None = None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank != self.rank)


@dataclass(frozen=True, slots=True)
class Member:
    """One group of a root. ranks: global ranks of its mesh. channel: name of the process group of
    exactly these ranks, alike on all of them; "" if there is none. signature: reads it anew."""

    fqn: str
    ranks: tuple[int, ...]
    channel: str
    signature: Callable[[], GroupSignature]
    limit_s: float


def make_ballots(members: Iterable[Member]) -> list[Ballot]:
    """One ballot per mesh of an FSDP root.

    None for a mesh of one rank, nor where other ranks are only pretended (the "fake" backend).
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return []
    meshes: dict[tuple[tuple[int, ...], str], list[Member]] = {}
    for member in members:
        meshes.setdefault((member.ranks, member.channel), []).append(member)
    return [_open(*mesh, found) for mesh, found in meshes.items() if len(mesh[0]) > 1]


def _open(ranks: tuple[int, ...], channel: str, members: list[Member]) -> Ballot:
    base = dist.distributed_c10d._get_default_store()
    limit: timedelta = base.timeout  # type: ignore[attr-defined]
    group_limit_s = min(member.limit_s for member in members)
    store = job_store(base, min(limit.total_seconds(), group_limit_s))
    rank = dist.get_rank()
    of_mesh = hashlib.sha256(json.dumps([ranks, channel]).encode()).hexdigest()[:16]
    # The store counts the roots of this mesh, so that the nth of each rank belong together: all
    # ranks of a mesh use their roots in one order, or their collectives would not meet either.
    # Threads, each with a process group of its own, may use theirs in any order.
    # Names of groups are no part of it, so that ranks whose groups differ meet and can say so.
    name = f"graphshard/{of_mesh}/{store.add(f'graphshard/{of_mesh}/{rank}', 1)}"
    take_away(store)
    return Ballot(
        OwnStore(name, store, len(ranks)),
        rank,
        ranks,
        tuple(member.fqn for member in members),
        limit.total_seconds(),
        name=name,
        shared=store,
        signature=lambda: tuple(member.signature() for member in members),
        group_limit_s=group_limit_s,
    )


def whole_of(ballots: Sequence[Ballot]) -> Ballot | None:
    """That of the mesh which has all ranks of the others. None if there is no such mesh: what some
    ranks agree on, others would not know."""
    ranks = {rank for ballot in ballots for rank in ballot.ranks}
    return next((ballot for ballot in ballots if set(ballot.ranks) == ranks), None)


def named(fqns: tuple[str, ...]) -> str:
    """A few of the groups, and how many there are."""
    shown = ", ".join(fqns[:4]) + (f", ... ({len(fqns)} groups)" if len(fqns) > 4 else "")
    return shown or "no group"


def collect(
    ballot: Ballot, keys: Mapping[int, str], what: str, limit_s: float, look: Callable[[], None]
) -> dict[int, str]:
    """What every rank left under its key, in rank order. Raises DivergedRanks (GS704) when
    `limit_s` passes or the store is gone. look: called again and again while ranks are missing."""
    with asking(ballot, what):
        return _collect(ballot, keys, what, limit_s, look)


@contextmanager
def asking(ballot: Ballot, what: str) -> Iterator[None]:
    """A StoreLost (GS704) from inside says what the rank waited for."""
    try:
        yield
    except StoreLost as error:
        text = f"{error.message} while rank {ballot.rank} waited for {what}"
        hint = "the rank that hosts it has ended, and says why"
        raise StoreLost("GS704", f"{text}; {hint}") from error


def _collect(
    ballot: Ballot, keys: Mapping[int, str], what: str, limit_s: float, look: Callable[[], None]
) -> dict[int, str]:
    began, told, pause_s = time.monotonic(), False, POLL_S[0]
    while not ballot.store.check(list(keys.values())):
        waited_s = time.monotonic() - began
        look()
        if waited_s > min(limit_s, SLOW_S) and (not told or waited_s > limit_s):
            missing = [rank for rank, key in keys.items() if not ballot.store.check([key])]
            if not missing:  # they have come meanwhile
                continue
            text = f"rank {', '.join(map(str, missing))} did not come to {what} in {waited_s:.0f} s"
            if waited_s > limit_s:
                raise DivergedRanks("GS704", text)
            logger.warning("rank %d waits: %s", ballot.rank, text)
            told = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])
    values = ballot.store.multi_get(list(keys.values()))
    return {rank: value.decode() for rank, value in zip(keys, values, strict=True)}


def stay_until_read(ballots: Iterable[Ballot], question: str) -> None:
    """Called before an error is raised: if this rank hosts the store and leaves, the others would
    find no store in place of the error. Never raises, and stays for LEAVE_S at most."""
    until = time.monotonic() + LEAVE_S
    for ballot in ballots:
        keys = [f"{question}/{rank}/read" for rank in ballot.others]
        try:
            ballot.store.set(f"{question}/{ballot.rank}/read", "")
            while not ballot.store.check(keys) and time.monotonic() < until:
                time.sleep(POLL_S[1])
        except StoreLost as error:  # the others have read it, and left
            logger.debug("rank %d: the store is gone: %s", ballot.rank, error)


def note(ballot: Ballot, key: str, text: str) -> None:
    """Leave a hint for others that wait. Never raises: this rank may be on its way out, with an
    error that a lost store must not replace."""
    if ballot.is_lost:
        return
    try:
        ballot.store.set(key, text)
    except StoreLost as error:
        ballot.is_lost = True
        logger.debug("rank %d: the store is gone: %s", ballot.rank, error)
