"""Whether a graph has all groups of its model, and what runs the others.

In comes a plan; out come a sentence and `Outside`s.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.schedule.plan import Plan
from graphshard.view.ranges import groups_text

# A plan that is written when it begins to run: which others follow is not known then.
UNKNOWN = "This file does not say whether the model has groups outside of this graph."
UNREACHED = "in another graph, or not reached by a compiled call so far"


@dataclass(frozen=True, slots=True)
class Outside:
    """Groups that one thing keeps out of the graph."""

    names: str
    why: str


def captured_text(plan: Plan) -> str:
    """Empty for a plan without groups."""
    if not plan.groups:
        return ""
    if plan.left_out is None:
        return UNKNOWN
    inside, outside = len(plan.groups), len(plan.left_out)
    if not outside:
        every = "the only group" if inside == 1 else f"all {inside:,} groups"
        return f"Captured completely: one graph runs {every}."
    return f"Captured in part: this graph runs {inside:,} of {inside + outside:,} groups."


def outside_of(plan: Plan) -> list[Outside]:
    """In the order of the model, alike causes together."""
    by_cause: dict[str, list[str]] = {}
    for group in plan.left_out or ():
        by_cause.setdefault(group.cause, []).append(group.fqn)
    return [
        Outside(groups_text(names), f"eager FSDP2 runs them: {cause}" if cause else UNREACHED)
        for cause, names in by_cause.items()
    ]
