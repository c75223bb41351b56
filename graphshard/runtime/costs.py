"""What all ranks of a mesh plan with: the costs of its lowest rank, and what is agreed already.

In: what this rank knows. Out: what the lowest one knows, left in the job's store. Ranks with equal
costs come to equal plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial

from graphshard.runtime.agree import look_for
from graphshard.runtime.ballot import Ballot, Terms, collect, whole_of
from graphshard.schedule.plan import Activation, Plan, Recomputed


def lead_costs(ballots: Sequence[Ballot], own: str) -> str:
    """The costs of the lowest rank, for this rank to plan with; `own` if no mesh has all ranks.

    Raises DivergedRanks (GS703, GS704, GS707) if that rank does not plan.
    """
    ballot = whole_of(ballots)
    if ballot is None:
        return own
    lead, keys = ballot.ranks[0], {ballot.ranks[0]: "costs"}
    if ballot.rank == lead:
        ballot.store.set("costs", ballot.costs or own)
    look = partial(look_for, ballot, keys, {})
    return collect(ballot, keys, "plan", ballot.limit_s, look)[lead]


def say_costs(ballots: Iterable[Ballot], costs: str) -> None:
    """These are the lowest rank's costs from now on. On all ranks alike, before any plan."""
    for ballot in ballots:
        ballot.costs = costs
        if ballot.rank == ballot.ranks[0]:
            ballot.store.set("costs", costs)


def agreed_recompute(ballots: Sequence[Ballot], fqns: tuple[str, ...]) -> Recomputed | None:
    """What the ranks compute again in a graph of groups `fqns` that trains; None if they have not
    agreed on it."""
    ballot = whole_of(ballots)
    if ballot is None:
        return None
    for plan, _ in ballot.agreed:
        if plan.backward is not None and tuple(g.fqn for g in plan.groups) == fqns:
            return plan.recompute
    said = None if ballot.agreed else ballot.store.get(_recompute_key(fqns))
    return None if said is None else _recomputed(said)


def lead_recompute(ballots: Sequence[Ballot], own: Recomputed) -> Recomputed:
    """What the lowest rank computes again in the first graph that trains; `own` where it is not the
    first, or where that rank has gone on without saying.

    Batches of other lengths cost something else on each rank, and of graphs that compute other
    things again the collectives differ. Raises DivergedRanks as `lead_costs` does.
    """
    ballot = whole_of(ballots)
    if ballot is None or any(plan.backward is not None for plan, _ in ballot.agreed):
        return own
    lead, key = ballot.ranks[0], f"{ballot.slot}/recompute"
    if ballot.rank == lead:
        ballot.store.set(key, _text(own))
        return own
    said = collect_unless_away(ballot, {lead: key}, "what is computed again")
    return own if said is None else _recomputed(said[lead])


def collect_unless_away(
    ballot: Ballot, keys: Mapping[int, str], what: str
) -> dict[int, str] | None:
    """What the ranks leave under their keys before they vote on the question of now; None if one of
    them has voted without, or has the graph already: then it leaves nothing, and all see that."""
    seen: dict[int, tuple[bytes, float]] = {}

    def look() -> None:
        for rank, key in keys.items():
            if not ballot.store.check([key]) and _is_away(ballot, rank):
                raise _Away
        look_for(ballot, keys, seen)

    try:
        return collect(ballot, keys, what, ballot.limit_s, look)
    except _Away:
        return None


class _Away(Exception):
    """A rank has gone on without saying what is asked."""


def _is_away(ballot: Ballot, rank: int) -> bool:
    gone = f"{ballot.slot}/{rank}/vote", f"joined/{rank}"
    return any(ballot.store.check([key]) for key in gone)


def _text(chosen: Recomputed) -> str:
    return json.dumps(astuple(chosen))


def _recomputed(text: str | bytes) -> Recomputed:
    again, checkpoints, replaced, away = json.loads(text)
    again, away = (tuple(Activation(*pair) for pair in pairs) for pairs in (again, away))
    return Recomputed(again, checkpoints, replaced, away)


def _recompute_key(fqns: tuple[str, ...]) -> str:
    return f"recompute/{hashlib.sha256(json.dumps(fqns).encode()).hexdigest()[:16]}"


def join(ballots: Iterable[Ballot], plan: Plan, terms: Terms, costs: str) -> None:
    """This rank runs `plan` for roots that it had no question about: it has the graph already.

    A rank that compiles it for them asks, and finds the costs here; this one answers
    (`runtime.agree.answer`).
    """
    for ballot in ballots:
        ballot.agreed.append((plan, terms))
        ballot.store.set(f"joined/{ballot.rank}", "")
        if plan.backward is not None:
            key = _recompute_key(tuple(group.fqn for group in plan.groups))
            ballot.store.set(key, _text(plan.recompute))
        say_costs([ballot], costs)
