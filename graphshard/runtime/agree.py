"""The ranks of one mesh agree on what they run, through the job's store and never by a collective.

In: the plan that this rank made for one graph of an FSDP root. Out: the plan to run, or the same
DivergedRanks on every rank. A signature that the ranks agreed on before is not asked about again,
so a rank that compiles anew for another length waits for nobody.

Each question has a number, the ballot's `slot`. A rank leaves its vote under that number and reads
the others'. A rank that runs something agreed on earlier has no question; it answers one when a
collective of its own is late (`answer`), for then the rank that asks is the one that is missing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NoReturn, TypeAlias

from graphshard.errors import DivergedRanks, StoreLost
from graphshard.runtime import claims
from graphshard.runtime.aside import look_again
from graphshard.runtime.ballot import (
    Ballot,
    Terms,
    asking,
    collect,
    named,
    note,
    stay_until_read,
    whole_of,
)
from graphshard.runtime.claims import structure
from graphshard.runtime.company import is_alone
from graphshard.runtime.votes import (
    FSDP2_RUNS,
    Vote,
    all_have_spare,
    compare,
    groups_error,
    is_running,
    leave_with,
    other_groups,
    other_uses,
    stopped,
)
from graphshard.schedule import group_signature
from graphshard.schedule.plan import Plan
from graphshard.schedule.signature import CollectiveSignature, fingerprint, to_text

logger = logging.getLogger(__name__)

SILENT_S = 10.0  # of a rank that is in the model and gets no further: FSDP2 runs it there
COMPILING, IDLE = "compiling", "idle"
STEP_LIMIT_S = 60.0  # for `verify="every"`: then they are an error
# From a plan to one of another graph that issues the same, in the same order; from None to one that
# issues what FSDP2 would. None if there is none.
Follow: TypeAlias = Callable[[Plan | None], Plan | None]


# -- the question --------------------------------------------------------------------------------


def agree_on_plan(
    ballots: Iterable[Ballot],
    plan: Plan,
    terms: Terms | None = None,
    *,
    uses: Sequence[str] = (),
    ends_early: bool = False,
    follow: Follow = lambda plan: None,
) -> Plan:
    """The plan to run in place of `plan`: the same on all ranks, up to its name, or, of graphs of
    other ops, one that issues the same (`follow`).

    The plan of the lowest rank is taken where costs decided and it fits all ranks, if a mesh has
    all ranks of the others (`whole_of`); only then may reductions get a process group of their own.
    terms, uses, ends_early: see `Vote`. Raises DivergedRanks: GS701, GS702 (signatures or groups
    differ), GS703, GS709 (a rank cannot compile), GS704 (a rank did not answer within the time
    limit of the job's store), GS708 (options differ).
    """
    found = list(ballots)
    vote = Vote(plan.name, ends_early=ends_early, uses=tuple(uses), terms=dict(terms or {}))
    whole = whole_of(found)
    for ballot in sorted(found, key=lambda ballot: ballot is not whole):
        try:
            is_whole = ballot is whole
            settled = _settle(ballot, plan, vote, follow if is_whole else None)
        except DivergedRanks as error:
            tell(set(found) - {ballot}, plan.name, error)
            raise
        if whole is None or ballot is whole:  # on the other meshes it is only compared
            plan = settled
    # A process group needs all ranks: that of one plan for all, and of no other.
    return plan if whole is not None else plan.on_fsdp2_groups()


def tell(ballots: Iterable[Ballot], graph: str, error: DivergedRanks) -> None:
    """Say on other meshes that this rank does not go on: its ranks there have no part in
    what went wrong, and would wait for it."""
    vote = Vote(graph, refusal=error.message, stops=error.code not in FSDP2_RUNS)
    for ballot in ballots:
        note(ballot, f"{ballot.slot}/{ballot.rank}/vote", json.dumps(asdict(vote)))
        ballot.slot += 1


def _settle(ballot: Ballot, plan: Plan, vote: Vote, follow: Follow | None) -> Plan:
    """follow: None where the ranks of the ballot only compare what they send."""
    may_adopt = follow is not None

    def sent(one: Plan) -> str:
        """All that it sends, where it may be adopted, and else what it sends on this mesh."""
        return fingerprint(one.collective_signature if may_adopt else _part(ballot, one))

    own = sent(plan)
    agreed = [known for known, terms in ballot.agreed if terms == vote.terms]
    alike = next((known for known in agreed if own == sent(known)), None)
    if alike is not None:
        plan = replace(plan, reduces_apart=plan.reduces_apart and alike.reduces_apart)
    if not agreed or follow is None:
        return _voted(ballot, plan, vote, follow) if alike is None else plan
    shape = structure(plan)
    same = next((known for known in agreed if structure(known) == shape), None)
    if same is not None:  # costs changed with the batch; the ranks did not
        return plan if sent(same) == own else replace(same, name=plan.name)
    # Other ranks may run what was agreed on for a graph of other ops beside this one.
    first = next((known for known in agreed if claims.uses_alike(known, plan)), None)
    is_known = alike is not None
    if first is not None and sent(first) != own and (followed := follow(first)) is not None:
        plan, is_known = followed, True
    key = claims.key_of(shape, vote.terms, beside="" if first is None else sent(first))
    found = claims.claimed(ballot, key, plan, is_known=is_known)
    if found is None:
        found = _voted(ballot, plan, vote, follow)
        note(ballot, key, found.to_json(indent=None))
    else:
        ballot.agreed.append((found, vote.terms))
    return found


def _voted(ballot: Ballot, plan: Plan, vote: Vote, follow: Follow | None) -> Plan:
    number, lead = ballot.slot, ballot.ranks[0]
    spare = None if follow is None else follow(None)
    if spare is not None:
        vote = replace(vote, spare=fingerprint(_part(ballot, spare)))
    votes = _ask(ballot, plan, vote, may_adopt=follow is not None)
    alike = len({vote.structure for vote in votes.values()}) == 1
    adopts = votes[lead].is_planned and alike and not is_running(votes)
    takes_spare = not adopts and spare is not None and all_have_spare(votes)
    compare(ballot, number, votes, signatures=not adopts and not takes_spare)
    if takes_spare:
        assert spare is not None
        plan = spare
    elif adopts:
        (text,) = ballot.store.multi_get([f"{number}/{lead}/plan"])
        plan = replace(Plan.from_json(text.decode()), name=plan.name)
    else:
        plan = plan.on_fsdp2_groups()
    ballot.agreed.append((plan, vote.terms))
    if not is_running(votes):
        ballot.voted = plan.name
    return plan


def told(ballots: Iterable[Ballot], key: str, text: str) -> list[str]:
    """What every rank says under `key`, in rank order; `text` alone if there is no other rank.

    All ranks of the meshes call it at the same forward. Raises DivergedRanks (GS704) if one does
    not within the store's time limit, and what `answer` raises.
    """
    found: dict[int, str] = {}
    asked = [ballot for ballot in ballots if not is_alone(ballot)]
    for ballot in asked:  # all said before any is read: ranks may know their meshes in any order
        ballot.store.set(f"{key}/{ballot.rank}", text)
    for ballot in asked:
        keys = {rank: f"{key}/{rank}" for rank in ballot.ranks}
        found |= collect(ballot, keys, key, ballot.limit_s, partial(answer, [ballot]))
        ballot.store.replace_last("told", [keys[ballot.rank]])
    return [found[rank] for rank in sorted(found)] or [text]


def lead_says(ballot: Ballot, key: str, text: str, *, before: str, old: str) -> str | None:
    """What the lowest rank said under the key `before`, in an earlier call; None if there was none,
    or the store is gone. It says `text` under `key` now, and takes back what it said under `old`.

    Who is ahead of the lowest rank waits for it, and for nothing that it needs to get there.
    """
    lead = ballot.ranks[0]
    try:
        if ballot.rank == lead:
            ballot.store.set(key, text)
            if old:
                ballot.store.delete_key(old)
        if not before:
            return None
        look = partial(answer, [ballot])
        return collect(ballot, {lead: before}, before, ballot.limit_s, look)[lead]
    except StoreLost as error:
        ballot.is_lost = True
        logger.debug("rank %d: the store is gone: %s", ballot.rank, error)
        return None


def refuse(
    ballots: Iterable[Ballot],
    graph: str,
    reason: str,
    *,
    waits: bool,
    uses: Sequence[str] = (),
    ends_early: bool = False,
) -> bool:
    """Say that this rank cannot compile. True if that holds for all ranks (asked only if `waits`;
    else this rank raises, and stays until the others know).

    Raises DivergedRanks: GS702 if ranks have other groups, so that FSDP2 cannot run them either,
    GS704 if a rank did not answer.
    """
    alike = True
    for ballot in ballots:
        number, own = ballot.slot, tuple(fqn for fqn in uses if fqn in ballot.groups)
        vote = Vote(graph, refusal=reason, stops=not waits, uses=own, ends_early=ends_early)
        try:
            _cast(ballot, vote)
        except StoreLost as error:  # this rank has an error already
            logger.debug("rank %d: the store is gone: %s", ballot.rank, error)
            continue
        if waits:
            votes = _votes(ballot)
            alike = alike and all(v.refusal for v in votes.values())
            found = other_groups(ballot, number, votes) or stopped(votes) or other_uses(votes)
            if found is not None:
                leave_with(ballot, number, found)
            note(ballot, f"{number}/{ballot.rank}/read", "")
        else:
            ballot.slot += 1
            stay_until_read([ballot], str(number))
    return alike


def mark(ballots: Iterable[Ballot], what: str) -> None:
    """Say where this rank is, while it may compile: COMPILING, IDLE (not in the model), or how much
    of the model Dynamo has traced."""
    for ballot in ballots:
        note(ballot, f"at/{ballot.rank}", what)


def leave(ballots: Iterable[Ballot], reason: str) -> None:
    """Say that this rank runs the whole root through FSDP2 from now on."""
    for ballot in ballots:
        note(ballot, f"left/{ballot.rank}", reason)


def answer(ballots: Sequence[Ballot]) -> None:
    """Called while a collective is late: if another rank asks for a new plan, say what runs here.

    Raises the DivergedRanks that the other rank raises too.
    """
    look_again(ballots)
    for ballot in ballots:
        if ballot.running is not None and _is_asked(ballot):
            number, vote = ballot.slot, Vote(ballot.running.name, runs=True, terms=ballot.terms)
            compare(ballot, number, _ask(ballot, ballot.running, vote))
        if ballot.also is not None:
            ballot.also()


def _is_asked(ballot: Ballot) -> bool:
    return any(ballot.store.check([f"{ballot.slot}/{rank}/vote"]) for rank in ballot.others)


def _ask(ballot: Ballot, plan: Plan, vote: Vote, *, may_adopt: bool = False) -> dict[int, Vote]:
    """Leave this rank's vote and read all. What a vote refers to is stored before it."""
    signature, own = _part(ballot, plan), f"{ballot.slot}/{ballot.rank}"
    with asking(ballot, _question(ballot)):
        if may_adopt and ballot.rank == ballot.ranks[0]:
            ballot.store.set(f"{own}/plan", plan.to_json(indent=None))
        ballot.store.set(f"{own}/signature", to_text(signature))
        said = replace(
            vote,
            uses=tuple(fqn for fqn in vote.uses if fqn in ballot.groups),
            fingerprint=fingerprint(signature),
            structure=structure(plan),
            is_planned=may_adopt,
        )
        _cast(ballot, said)
    votes = _votes(ballot)
    ballot.store.replace_last(
        "vote", [f"{own}/{what}" for what in ("vote", "signature", "plan", "groups")]
    )
    return votes


def _cast(ballot: Ballot, vote: Vote) -> None:
    """What runs was compared when it began, so only what is new says what its groups are."""
    own = f"{ballot.slot}/{ballot.rank}"
    if not vote.runs:
        text = group_signature.to_text(ballot.signature())
        ballot.store.set(f"{own}/groups", text)
        vote = replace(vote, groups=group_signature.fingerprint(text))
    ballot.store.set(f"{own}/vote", json.dumps(asdict(vote)))


def _question(ballot: Ballot) -> str:
    return f"a new graph of {named(ballot.groups)}"


def _votes(ballot: Ballot) -> dict[int, Vote]:
    """All votes on the question of now; the next question is another one, whatever happens."""
    number = ballot.slot
    keys = {rank: f"{number}/{rank}/vote" for rank in ballot.ranks}
    what = _question(ballot)
    look = partial(look_for, ballot, keys, {})
    try:
        texts = collect(ballot, keys, what, ballot.limit_s, look)
    except DivergedRanks as error:
        refusal = asdict(Vote(what, refusal=error.message))  # for ranks that come too late
        note(ballot, f"{number}/{ballot.rank}/vote", json.dumps(refusal))
        note(ballot, f"{number}/{ballot.rank}/read", "")  # nobody stays for this rank
        raise
    finally:
        ballot.slot += 1
    return {rank: Vote(**json.loads(text)) for rank, text in texts.items()}


def look_for(ballot: Ballot, keys: Mapping[int, str], seen: dict[int, tuple[bytes, float]]) -> None:
    """Raises DivergedRanks if a rank that is missing runs through FSDP2: GS703 if it said so, GS707
    if it is in the model and traces nothing more. seen: where each was, and since when."""
    now = time.monotonic()
    for rank in ballot.others:
        if rank not in keys or ballot.store.check([keys[rank]]):
            continue
        if (reason := ballot.store.get(f"left/{rank}")) is not None:
            text = f"rank {rank} runs through eager FSDP2: {reason.decode()}"
            _follow(ballot, rank, "GS703", text)
        at = ballot.store.get(f"at/{rank}") or b""
        place, since = seen.setdefault(rank, (at, now))
        if at != place or at.decode() in ("", COMPILING, IDLE):
            seen[rank] = at, now
        elif now - since > SILENT_S:
            text = f"rank {rank} is in the model and compiles nothing (a graph break?)"
            _follow(ballot, rank, "GS707", text)


def _follow(ballot: Ballot, rank: int, code: str, text: str) -> NoReturn:
    """Eager FSDP2 runs `rank`, and could run this one beside it if their groups are the same."""
    if (arrived := ballot.store.get(f"arrived/{rank}")) is not None:
        there = group_signature.from_text(arrived.decode())
        where = group_signature.difference({ballot.rank: ballot.signature(), rank: there})
        if where is not None:
            raise groups_error(where)
    raise DivergedRanks(code, text)


def _part(ballot: Ballot, plan: Plan) -> CollectiveSignature:
    """The plan's collectives on the ballot's mesh."""
    return tuple(e for e in plan.collective_signature if e.group.split(" + ")[0] in ballot.groups)


# -- every step ----------------------------------------------------------------------------------


def check_call(ballots: Iterable[Ballot], plan: Plan, fqns: tuple[str, ...]) -> None:
    """`verify="every"`: all ranks are about to run the same. fqns: the groups of this call.

    Raises the same DivergedRanks on every rank: GS705 if they run different graphs or groups, GS704
    if a rank did not come within STEP_LIMIT_S.
    """
    for ballot in ballots:
        number, own = ballot.calls, f"{plan.fingerprint}\n{named(fqns)}"
        ballot.calls += 1
        ballot.store.set(f"call/{number}/{ballot.rank}", own)
        if number > 1:  # every rank has read what was left two calls ago
            ballot.store.delete_key(f"call/{number - 2}/{ballot.rank}")
        keys = {rank: f"call/{number}/{rank}" for rank in ballot.ranks}
        limit_s = min(STEP_LIMIT_S, ballot.limit_s)
        what = f"call {number} of {named(fqns)}"
        found = collect(ballot, keys, what, limit_s, partial(answer, [ballot]))
        if len(set(found.values())) > 1:
            listed = "; ".join(f"rank {r} runs {t.split(chr(10))[1]}" for r, t in found.items())
            alike = len({t.split("\n")[1] for t in found.values()}) == 1
            hint = ", with other collectives" if alike else ""
            stay_until_read([ballot], f"call/{number}")
            raise DivergedRanks("GS705", f"at call {number}, {listed}{hint}")
