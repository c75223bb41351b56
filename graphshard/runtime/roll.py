"""All ranks of a mesh begin to run an FSDP root together, or none does.

In: the root's groups on this rank, and the options that all ranks need alike. Out: nothing, or the
same DivergedRanks on every rank. This is asked once, before anything is traced, since ranks that
differ here may never come to ask about a graph.
"""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from graphshard.errors import DivergedRanks, StoreLost
from graphshard.fsdp2 import FsdpGroup
from graphshard.fsdp2.signature import MeshRows, mesh_rows, signature_of
from graphshard.runtime.agree import look_for, tell
from graphshard.runtime.ballot import (
    Ballot,
    Member,
    Terms,
    asking,
    collect,
    make_ballots,
    named,
    note,
    stay_until_read,
)
from graphshard.runtime.votes import groups_error, groups_that_differ, other_terms
from graphshard.runtime.waiting import time_limit
from graphshard.schedule import group_signature
from graphshard.schedule.group_signature import GroupSignature

logger = logging.getLogger(__name__)


def members_of(groups: Iterable[FsdpGroup]) -> Iterator[Member]:
    """A member holds its group weakly: ballots are kept beside compiled graphs.

    Read where there are other ranks only: the meshes of a pretended world have no real numbers.
    """
    for group in groups:
        yield Member(
            group.fqn or "(root)",
            group.mesh_ranks,
            _channel(group),
            partial(_signature, weakref.ref(group), mesh_rows(group)),
            _limit_s(group),
        )


def _signature(group: weakref.ref[FsdpGroup], rows: MeshRows) -> GroupSignature:
    alive = group()
    assert alive is not None  # who asks runs its model
    return signature_of(alive, rows)


def _channel(group: FsdpGroup) -> str:
    for made in (group.gather_process_group, group.replicate_process_group):
        if made is not None and made.size() == len(group.mesh_ranks):
            return str(made.group_name)
    return ""


def _limit_s(group: FsdpGroup) -> float:
    """After which the group's collectives are given up; infinite where a backend has no limit."""
    found = (group.gather_process_group, group.replicate_process_group)
    limits = [time_limit(made, group.device) for made in found if made is not None]
    return min((limit for limit in limits if limit is not None), default=math.inf)


def open_ballots(members: Iterable[Member]) -> list[Ballot]:
    """One ballot per mesh of a root, on which this rank says at once what FSDP2 would send here."""
    ballots = make_ballots(members)
    for ballot in ballots:
        text = group_signature.to_text(ballot.signature())
        note(ballot, f"arrived/{ballot.rank}", text)
    return ballots


def call_roll(ballots: Iterable[Ballot], terms: Terms) -> None:
    """Wait until all ranks of the meshes are about to run this root, once.

    Raises DivergedRanks: GS702 (their groups differ, or their meshes), GS708 (options differ),
    GS704 (a rank does not come within the time limit of its collectives), GS707.
    """
    closed = [ballot for ballot in ballots if not ballot.is_open]
    for ballot in closed:  # all said before any is read: ranks may know their meshes in any order
        with asking(ballot, _question(ballot)):
            _say(ballot, terms)
    try:
        heard = [_hear(ballot) for ballot in closed]
    finally:
        for ballot in closed:
            _wait_nowhere(ballot)
    failed = [error for error in heard if error is not None]
    if failed:
        # For ranks that heard all there in time, and on other meshes.
        tell(closed, _question(closed[0]), failed[0])
        raise failed[0]
    for ballot in closed:
        ballot.is_open = True


def _say(ballot: Ballot, terms: Terms) -> None:
    text = group_signature.to_text(ballot.signature())
    ballot.store.set(f"roll/{ballot.slot}/{ballot.rank}/groups", text)
    said = {"terms": dict(terms), "groups": group_signature.fingerprint(text)}
    ballot.store.set(f"roll/{ballot.slot}/{ballot.rank}", json.dumps(said))
    place = {"name": ballot.name, "key": f"roll/{ballot.slot}", "ranks": ballot.ranks}
    if ballot.shared is not None:
        ballot.shared.set(_opening(ballot.rank), json.dumps(place))


def _wait_nowhere(ballot: Ballot) -> None:
    """Take back where this rank waits: what was said there goes with the model (`leftovers`)."""
    if ballot.shared is None or ballot.is_lost:
        return
    try:
        ballot.shared.set(_opening(ballot.rank), "")
    except StoreLost as error:  # this rank has an error already, or none needs the store
        ballot.is_lost = True
        logger.debug("rank %d: the store is gone: %s", ballot.rank, error)


def _opening(rank: int) -> str:
    """Key of the place where `rank` waits for others to begin a root; "" if it does not."""
    return f"graphshard/opening/{rank}"


def _hear(ballot: Ballot) -> DivergedRanks | None:
    question = f"roll/{ballot.slot}"
    keys = {rank: f"{question}/{rank}" for rank in ballot.ranks}
    look = partial(_look, ballot, keys, question, {})
    most_s = min(ballot.limit_s, ballot.group_limit_s)
    try:
        texts = collect(ballot, keys, _question(ballot), most_s, look)
        with asking(ballot, _question(ballot)):
            _check_failed(ballot, question)  # this rank may be the one that the others gave up
            found = _divergence(ballot, question, texts)
    except DivergedRanks as error:
        found = error
    ballot.slot += 1
    if found is not None:
        note(ballot, f"{question}/failed", json.dumps([found.code, found.message]))
        stay_until_read([ballot], question)
    return found


def _question(ballot: Ballot) -> str:
    return f"its first compiled call of {named(ballot.groups)}"


def _divergence(ballot: Ballot, question: str, texts: Mapping[int, str]) -> DivergedRanks | None:
    said: dict[int, Any] = {rank: json.loads(text) for rank, text in texts.items()}
    error = other_terms({rank: row["terms"] for rank, row in said.items()})
    if error is not None:
        return error
    prints = {rank: row["groups"] for rank, row in said.items()}
    where = groups_that_differ(ballot, prints, lambda rank: f"{question}/{rank}/groups")
    return None if where is None else groups_error(where)


def _look(
    ballot: Ballot,
    keys: dict[int, str],
    question: str,
    seen: dict[int, tuple[bytes, float]],
) -> None:
    """Called while ranks are missing. What one that takes no part says stands in for its answer."""
    _check_failed(ballot, question)
    for rank in [r for r in ballot.others if not ballot.store.check([keys[r]])]:
        if ballot.store.check([f"aside/{rank}"]):
            keys[rank] = f"aside/{rank}"
        else:
            _check_elsewhere(ballot, rank, keys[rank])
    look_for(ballot, keys, seen)


def _check_failed(ballot: Ballot, question: str) -> None:
    """Raises the DivergedRanks that another rank has raised already."""
    if (said := ballot.store.get(f"{question}/failed")) is not None:
        raise DivergedRanks(*json.loads(said))


def _check_elsewhere(ballot: Ballot, rank: int, awaited: str) -> None:
    """Raises DivergedRanks (GS702) if `rank` waits for this rank on another mesh, and this one for
    it here: neither would ever come. awaited: key of what it is to say here."""
    if ballot.shared is None or not (said := ballot.shared.get(_opening(rank))):
        return
    place: dict[str, Any] = json.loads(said)
    there = ballot.shared.below(place["name"])
    waits_here = ballot.rank in place["ranks"] and place["name"] != ballot.name
    spoke = any(there.check([f"{key}/{ballot.rank}"]) for key in (place["key"], "aside"))
    # Looked up last: it may have spoken here in the meantime, and gone on to another root.
    if not waits_here or spoke or ballot.store.check([awaited]):
        return
    meshes = {ballot.rank: ballot.ranks, rank: tuple(place["ranks"])}
    text = f"the ranks of the model's mesh are {group_signature.values_by_rank(meshes)}"
    raise DivergedRanks("GS702", text)
