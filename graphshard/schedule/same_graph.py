"""A plan under the names and settings of another model that runs the same graph.

In: a plan, the groups that it was made for, and those of an identical model, both as described
before planning. Out: the plan of the second. Steps, costs and figures are the same: equal graphs on
equal ranks are planned alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from graphshard.schedule.groups import GroupInfo
from graphshard.schedule.plan import Plan


def plan_for(plan: Plan, first: Sequence[GroupInfo], own: Sequence[GroupInfo]) -> Plan:
    """first, own: the groups by their number in `plan`; the plan was made for `first`."""
    if tuple(first) == tuple(own):
        return plan
    pairs = {was.id: (was, now) for was, now in zip(first, own, strict=True)}
    names = {was.fqn: now.fqn for was, now in pairs.values()}
    return replace(
        plan,
        groups=tuple(_group(group, *pairs[group.id]) for group in plan.groups),
        recompute=plan.recompute.renamed(lambda fqn: names.get(fqn, fqn)),
    )


def _group(planned: GroupInfo, was: GroupInfo, now: GroupInfo) -> GroupInfo:
    """What the planner decided about `was` stays; what is another fact of `now` takes its place."""
    facts = [f.name for f in fields(GroupInfo) if f.name not in ("id", "params")]
    changed = {n: getattr(now, n) for n in facts if getattr(now, n) != getattr(was, n)}
    rows = zip(planned.params, now.params, strict=True)
    return replace(planned, params=tuple(replace(p, fqn=o.fqn) for p, o in rows), **changed)
