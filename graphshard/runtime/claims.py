"""Graphs after the first one: who comes first with one says which plan all ranks run.

In: the plan that this rank made for a graph. Costs may make it another one on each rank, and one of
them may be agreed on already, for another graph: its rank runs it and waits for nobody, and so all
others have to take it. All graphs of one structure can issue what one plan does; where their
regions differ, each at places of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace

from graphshard.errors import StoreLost
from graphshard.runtime.ballot import Ballot, Terms, note
from graphshard.schedule.plan import Plan

_ASKED = "asked"  # in the place of a plan: the ranks vote on it


def structure(plan: Plan) -> str:
    """Equal for two graphs of the same groups, as many ops and the same communication to place."""
    stages = [
        [
            schedule.direction,
            max((step.stop for step in schedule.steps), default=0),
            sorted({(str(s.kind), g) for s in schedule.steps for g in s.groups}),
        ]
        for schedule in plan.schedules
    ]
    # What stays between micro-steps is for the planner to say.
    groups = [asdict(replace(group, between_micro_steps=False)) for group in plan.groups]
    return hashlib.sha256(json.dumps([groups, stages]).encode()).hexdigest()


def uses_alike(one: Plan, other: Plan) -> bool:
    """Graphs of the same groups and directions, of whatever ops: ranks may run them at once."""
    directions = [[schedule.direction for schedule in plan.schedules] for plan in (one, other)]
    groups = [[group.fqn for group in plan.groups] for plan in (one, other)]
    return directions[0] == directions[1] and groups[0] == groups[1]


def key_of(shape: str, terms: Terms, beside: str = "") -> str:
    """Where the plan of graphs of this structure stands. beside: what is issued by graphs of other
    ops that ranks may run at the same time."""
    return f"graph/{hashlib.sha256(json.dumps([shape, dict(terms), beside]).encode()).hexdigest()}"


def claimed(ballot: Ballot, key: str, plan: Plan, *, is_known: bool) -> Plan | None:
    """The plan of the first rank that came with a graph like this; None: the ranks vote on it.

    is_known: what `plan` sends was agreed on for another graph.
    """
    try:
        said = ballot.store.claim(key, plan.to_json(indent=None) if is_known else _ASKED)
    except StoreLost:
        if not is_known:
            raise
        return plan
    return None if said == _ASKED else replace(Plan.from_json(said), name=plan.name)


def agreed_again(ballots: Iterable[Ballot], plan: Plan) -> None:
    """All ranks run `plan` now in the place of what they had agreed on for graphs of its structure,
    and so does whoever compiles one of them from now on; graphs of other ops follow it anew."""
    shape = structure(plan)
    for ballot in ballots:
        ballot.agreed[:] = [
            (known, terms)
            for known, terms in ballot.agreed
            if structure(known) == shape or not uses_alike(known, plan)
        ]
        for place, (known, terms) in enumerate(ballot.agreed):
            if structure(known) == shape:
                ballot.agreed[place] = plan, terms
                note(ballot, key_of(shape, terms), plan.to_json(indent=None))
