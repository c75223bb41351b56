"""What all ranks of a mesh plan with: the costs of its lowest rank, and what is agreed already.

In: what this rank knows. Out: what the lowest one knows, left in the job's store. Ranks with equal
costs come to equal plans.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial

from graphshard.runtime.agree import look_for
from graphshard.runtime.ballot import Ballot, Terms, collect
from graphshard.schedule.plan import Plan


def lead_costs(ballots: Iterable[Ballot], own: str) -> str:
    """The costs of the lowest rank, for this rank to plan with; `own` if there are several meshes.

    Raises DivergedRanks (GS703, GS704, GS707) if that rank does not plan.
    """
    found = list(ballots)
    if len(found) != 1:
        return own
    ballot = found[0]
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


def agreed_recompute(ballots: Sequence[Ballot], fqns: tuple[str, ...]) -> tuple[str, ...] | None:
    """FQNs of the groups that the ranks compute again in a graph of groups `fqns` that trains; None
    if they have not agreed on one."""
    if len(ballots) != 1:
        return None
    (ballot,) = ballots
    for plan, _ in ballot.agreed:
        if plan.backward is not None and tuple(g.fqn for g in plan.groups) == fqns:
            return plan.recompute
    said = None if ballot.agreed else ballot.store.get("recompute")
    return None if said is None else tuple(json.loads(said))


def join(ballots: Iterable[Ballot], plan: Plan, terms: Terms, costs: str) -> None:
    """This rank runs `plan` for roots that it had no question about: it has the graph already.

    A rank that compiles it for them asks, and finds the costs here; this one answers
    (`runtime.agree.answer`).
    """
    for ballot in ballots:
        ballot.agreed.append((plan, terms))
        ballot.store.set(f"joined/{ballot.rank}", "")
        ballot.store.set("recompute", json.dumps(plan.recompute))
        say_costs([ballot], costs)
