"""What the ranks of one mesh said, and whether they may go on together.

In: one `Vote` of each rank. Out: nothing, or the same DivergedRanks on every rank, which says where
they part and on which ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from graphshard.errors import DivergedRanks
from graphshard.runtime.ballot import Ballot, Terms, asking, stay_until_read
from graphshard.schedule import group_signature
from graphshard.schedule.group_signature import Groups, values_by_rank
from graphshard.schedule.signature import (
    CollectiveSignature,
    difference,
    from_text,
    same_order,
    same_way,
)

# The ranks may go on together after these, in eager FSDP2.
FSDP2_RUNS = ("GS701", "GS703", "GS707")


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank is about to run, or runs.

    structure: equal where one plan fits all (see `structure`). is_planned: the cost model made the
    plan. spare: fingerprint of what FSDP2 would issue, as a plan of the same graph; "" if there is
    none. runs: it is being run, too late to fall back. ends_early: the call goes on after it.
    refusal: why the rank cannot compile, or "". stops: it raises that, instead of falling back.
    uses: FQNs of the graph's groups, in the order of use; () if unknown.
    groups: fingerprint of what FSDP2 would send for the groups. terms: options that all ranks need
    alike.
    """

    graph: str
    fingerprint: str = ""
    structure: str = ""
    is_planned: bool = False
    spare: str = ""
    runs: bool = False
    ends_early: bool = False
    refusal: str = ""
    stops: bool = False
    uses: tuple[str, ...] = ()
    groups: str = ""
    terms: Terms = field(default_factory=dict)


def compare(
    ballot: Ballot, number: int, votes: Mapping[int, Vote], *, signatures: bool = True
) -> None:
    """Raises the same DivergedRanks on every rank unless all are about to run the same."""
    said = {rank: vote.terms for rank, vote in votes.items() if not vote.refusal}
    with asking(ballot, "what the other ranks said"):
        error = other_groups(ballot, number, votes) or other_terms(said)
        error = error or stopped(votes) or _refused(votes)
        if error is None and signatures:
            error = _other_signatures(ballot, number, votes)
    if error is not None:
        leave_with(ballot, number, error)


def leave_with(ballot: Ballot, number: int, error: DivergedRanks) -> NoReturn:
    stay_until_read([ballot], str(number))
    raise error


def other_groups(ballot: Ballot, number: int, votes: Mapping[int, Vote]) -> DivergedRanks | None:
    """GS702 if FSDP2 itself would not send the same. Not asked of what runs already: there a rank
    may be further on in the program, where the user has set something else on all ranks."""
    if is_running(votes):
        return None
    prints = {rank: vote.groups for rank, vote in votes.items()}
    where = groups_that_differ(ballot, prints, lambda rank: f"{number}/{rank}/groups")
    return None if where is None else groups_error(where)


def groups_that_differ(
    ballot: Ballot, prints: Mapping[int, str], key_of: Callable[[int], str]
) -> str | None:
    """Where the ranks' groups differ. prints: fingerprints of them by rank, "" where it said none.
    key_of: where the groups of a rank are in full."""
    said = {rank: print_ for rank, print_ in prints.items() if print_}
    if len(set(said.values())) <= 1:
        return None
    whole: dict[str, Groups] = {}
    for rank, print_ in said.items():
        if print_ not in whole:
            (text,) = ballot.store.multi_get([key_of(rank)])
            whole[print_] = group_signature.from_text(text.decode())
    return group_signature.difference({rank: whole[print_] for rank, print_ in said.items()})


def groups_error(where: str) -> DivergedRanks:
    text = f"FSDP2 itself would send different things for the ranks' groups: {where}"
    return DivergedRanks("GS702", text)


def other_terms(by_rank: Mapping[int, Terms]) -> DivergedRanks | None:
    """GS708 with the first option that the ranks do not have alike."""
    names = dict.fromkeys(name for terms in by_rank.values() for name in terms)
    for name in names:
        values = {rank: terms.get(name) for rank, terms in by_rank.items()}
        if len(set(map(json.dumps, values.values()))) > 1:
            text = f"all ranks need the same options: {name} is {values_by_rank(values)}"
            return DivergedRanks("GS708", text)
    return None


def stopped(votes: Mapping[int, Vote]) -> DivergedRanks | None:
    """GS709 if a rank raises what stood in its way."""
    for rank, vote in votes.items():
        if vote.stops:
            text = f"rank {rank} stopped while it compiled {vote.graph}: {vote.refusal}"
            return DivergedRanks("GS709", text)
    return None


def other_uses(votes: Mapping[int, Vote]) -> DivergedRanks | None:
    """GS702 if the ranks would use their groups in other orders, as FSDP2 then would."""
    orders = {rank: tuple(vote.uses) for rank, vote in votes.items() if vote.uses}
    if same_order(orders, {rank for rank, vote in votes.items() if vote.ends_early}):
        return None
    whys = dict.fromkeys(vote.refusal for vote in votes.values() if vote.refusal)
    text = f"the ranks use different groups: {values_by_rank(orders)}"
    return DivergedRanks("GS702", f"{text} (and compiling failed: {'; '.join(whys)})")


def _refused(votes: Mapping[int, Vote]) -> DivergedRanks | None:
    """GS703 if a rank cannot compile, and FSDP2 can take over on all of them."""
    if any(vote.refusal for vote in votes.values()) and not is_running(votes):
        found = other_uses(votes)
        if found is not None:
            return found
    for rank, vote in votes.items():
        if vote.refusal:
            text = f"rank {rank} could not compile {vote.graph}: {vote.refusal}"
            return DivergedRanks("GS702" if is_running(votes) else "GS703", text)
    return None


def _other_signatures(
    ballot: Ballot, number: int, votes: Mapping[int, Vote]
) -> DivergedRanks | None:
    """GS701 if FSDP2 can take over on all ranks, GS702 if it would hang as well."""
    texts: dict[str, CollectiveSignature] = {}
    for rank, vote in votes.items():
        if vote.fingerprint not in texts:
            (stored,) = ballot.store.multi_get([f"{number}/{rank}/signature"])
            texts[vote.fingerprint] = from_text(stored.decode())
    by_rank = {rank: texts[vote.fingerprint] for rank, vote in votes.items()}
    where = difference(by_rank)
    if where is None:
        return None
    names = ", ".join(f"{vote.graph} on rank {rank}" for rank, vote in votes.items())
    early = {rank for rank, vote in votes.items() if vote.ends_early}
    lenient = any(group.reduces_unused for group in ballot.signature())
    fits = same_way(by_rank, early, reduces_unused=lenient) and not is_running(votes)
    text = f"the ranks would issue different collectives: {where} ({names})"
    return DivergedRanks("GS701" if fits else "GS702", text)


def is_running(votes: Mapping[int, Vote]) -> bool:
    return any(vote.runs for vote in votes.values())


def all_have_spare(votes: Mapping[int, Vote]) -> bool:
    """What the ranks have planned differs, and each has the spare plan that the others have."""
    said = {vote.fingerprint for vote in votes.values()}
    return len(said) > 1 and "" not in said and len({vote.spare for vote in votes.values()}) == 1
