"""Graphs after the first one: who comes first with one says which plan all ranks run.

In: the plan that this rank made for a graph. Costs may make it another one on each rank, and one of
them may be agreed on already, for another graph: its rank runs it and waits for nobody, and so all
others have to take it. A plan fits all graphs of one structure.
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
    """Equal for two graphs that the same schedules fit: groups, ops and communication to place."""
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


def key_of(shape: str, terms: Terms) -> str:
    """Where the plan of graphs of this structure stands."""
    return f"graph/{hashlib.sha256(json.dumps([shape, dict(terms)]).encode()).hexdigest()}"


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
    and so does whoever compiles one of them from now on."""
    shape = structure(plan)
    for ballot in ballots:
        for place, (known, terms) in enumerate(ballot.agreed):
            if structure(known) == shape:
                ballot.agreed[place] = plan, terms
                note(ballot, key_of(shape, terms), plan.to_json(indent=None))
