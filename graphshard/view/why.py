"""Why a plan is as it is, as plain text, 80 columns wide: of the whole plan, or of one group."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from graphshard.files.information import printable
from graphshard.schedule.plan import GroupInfo, Plan
from graphshard.schedule.reasons import (
    ExchangeRate,
    Hold,
    Merge,
    NotEarlier,
    Offloading,
    Reason,
    Recomputation,
    Split,
    group_of,
)
from graphshard.view.names import shown
from graphshard.view.reasons import reason_text
from graphshard.view.text import STEP_WORDS, WIDTH, bytes_text, group_name, group_names

LABEL_WIDTH = 32
WORDS = {
    Recomputation: "compute again",
    Offloading: "offload",
    ExchangeRate: "time for memory",
}


def reasons_of(plan: Plan, fqn: str | None = None) -> list[Reason]:
    """All reasons of `plan`, or those that concern the group `fqn` ("" or "(root)": the root).

    Raises ValueError, which names the nearest group, if there is no such group.
    """
    group = None if fqn is None else _group_of(plan, fqn)
    return [r for r in plan.reasons if group is None or _concerns(plan, r, group)]


def why_text(plan: Plan, fqn: str | None = None) -> str:
    """What `reasons_of` finds, for people; with a group, when each of its collectives runs, too."""
    plan, fqn = shown(plan), None if fqn is None else printable(fqn)
    group = None if fqn is None else _group_of(plan, fqn)
    if group is not None:
        lines = [f"{group_name(group)}  ({bytes_text(group.gathered_bytes)} gathered)", ""]
        lines += _collectives(plan, group)
    else:
        lines = [plan.name, ""]
    names = group_names(plan)
    told = ((reason, reason_text(reason, names)) for reason in reasons_of(plan, fqn))
    for (_, text), alike in groupby(told, key=lambda pair: (_label(pair[0], ""), pair[1])):
        reasons = [reason for reason, _ in alike]
        label = _label(reasons[0], "" if group is not None else _about(reasons, names))
        lines += _wrapped(label, text)
    if not plan.reasons:
        lines.append("the plan has no reasons: nothing was chosen")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _group_of(plan: Plan, fqn: str) -> GroupInfo:
    known = {group_name(g): g for g in plan.groups}
    found = known.get(fqn or "(root)")
    if found is None:
        near = difflib.get_close_matches(fqn, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"the plan has no group {fqn!r}; {hint}")
    return found


def _concerns(plan: Plan, reason: Reason, group: GroupInfo) -> bool:
    """A collective that carries several groups has its reason under the first of them."""
    about = group_of(reason)
    if about == group.id or not isinstance(reason, NotEarlier):
        return about == group.id
    return any(
        reason.kind is step.kind and about == step.group and group.id in step.groups
        for schedule in plan.schedules
        if schedule.direction is reason.direction
        for step in schedule.steps
    )


def _collectives(plan: Plan, group: GroupInfo) -> Iterator[str]:
    """When each collective of the group runs, in the model."""
    found = False
    for schedule, forecast in zip(plan.schedules, plan.forecasts, strict=False):
        for time in forecast.collectives:
            step = schedule.steps[time.issue]
            if group.id in step.groups:
                found = True
                when = f"step {time.issue}, {time.start_us:,.3f} to {time.end_us:,.3f} us"
                yield from _wrapped(f"{schedule.direction}, {STEP_WORDS[step.kind]}", when)
    if found:
        yield ""


def _about(reasons: Sequence[Reason], names: Mapping[int, str]) -> str:
    """The groups of which the same is said; empty if it is said of none."""
    about = [names[number] for number in map(group_of, reasons) if number is not None]
    return f"{about[0]} to {about[-1]} ({len(about)})" if len(about) > 2 else ", ".join(about)


def _label(reason: Reason, group: str) -> str:
    """What the reason is about; group: its name, or "" if that stands elsewhere."""
    direction = reason.direction if isinstance(reason, Merge | Split | NotEarlier) else ""
    return ", ".join(word for word in (direction, _kind(reason), group) if word)


def _kind(reason: Reason) -> str:
    if isinstance(reason, NotEarlier):
        return STEP_WORDS[reason.kind]
    if isinstance(reason, Hold):
        return "keep" if reason.is_kept else "reshard"
    return WORDS.get(type(reason), reason.what)


def _wrapped(label: str, text: str) -> list[str]:
    """The label in a column of its own, or above the text where it is too long for that."""
    indent = " " * LABEL_WIDTH
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    if len(label) < LABEL_WIDTH - 1 and lines:
        return [label + lines[0][len(label) :], *lines[1:]]
    return [label, *lines]
