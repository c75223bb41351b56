"""Names in a plan as text that can be printed: what a terminal would obey is shown instead.

Plan files come from others, and a module may be called anything, two lines long for example.
"""

from __future__ import annotations

from dataclasses import replace

from graphshard.files.information import printable
from graphshard.schedule.groups import GroupInfo, Origin
from graphshard.schedule.plan import LeftOut, Plan
from graphshard.schedule.reasons import Offloading, Reason, Recomputation


def shown(plan: Plan) -> Plan:
    """`plan` with printable texts."""
    priced = plan.priced_on
    return replace(
        plan,
        name=printable(plan.name),
        torch_version=printable(plan.torch_version),
        groups=tuple(map(_group, plan.groups)),
        recompute=plan.recompute.renamed(printable),
        reasons=tuple(map(_reason, plan.reasons)),
        left_out=None if plan.left_out is None else tuple(map(_left_out, plan.left_out)),
        priced_on=priced and replace(priced, machine=printable(priced.machine)),
    )


def _left_out(group: LeftOut) -> LeftOut:
    return LeftOut(printable(group.fqn), printable(group.cause))


def _reason(reason: Reason) -> Reason:
    if isinstance(reason, Recomputation):
        again, saved = (tuple(map(_origin, part)) for part in (reason.again, reason.saved))
        return replace(reason, again=again, saved=saved)
    if isinstance(reason, Offloading):
        return replace(reason, away=tuple(map(_origin, reason.away)))
    return reason


def _origin(origin: Origin) -> Origin:
    return Origin(printable(origin.op), printable(origin.module))


def _group(group: GroupInfo) -> GroupInfo:
    params = tuple(replace(p, fqn=printable(p.fqn), dtype=printable(p.dtype)) for p in group.params)
    fqn, dtype = printable(group.fqn), printable(group.reduce_dtype)
    return replace(group, fqn=fqn, reduce_dtype=dtype, params=params)
