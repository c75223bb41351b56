"""Whether a graph has all groups of its model, and what runs the others.

In comes a plan; out come a sentence and `Outside`s.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.schedule.plan import Plan
from graphshard.view.ranges import groups_text

UNREACHED = "in another graph, or not reached by a compiled call so far"


@dataclass(frozen=True, slots=True)
class Outside:
    """Groups that one thing keeps out of the graph."""

    names: str
    why: str


def captured_text(plan: Plan) -> str:
    """Empty where that is not known."""
    if plan.left_out is None or not plan.groups:
        return ""
    inside, outside = len(plan.groups), len(plan.left_out)
    if not outside:
        return f"One graph runs {'the only group' if inside == 1 else f'all {inside:,} groups'}."
    return f"This graph runs {inside:,} of {inside + outside:,} groups."


def outside_of(plan: Plan) -> list[Outside]:
    """In the order of the model, alike causes together."""
    by_cause: dict[str, list[str]] = {}
    for group in plan.left_out or ():
        by_cause.setdefault(group.cause, []).append(group.fqn)
    return [
        Outside(groups_text(names), f"eager FSDP2 runs them: {cause}" if cause else UNREACHED)
        for cause, names in by_cause.items()
    ]
