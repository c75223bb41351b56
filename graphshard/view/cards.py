"""What is said of a collective, of a wait for it and of a group's decisions.

In come a `Sheet` and one of its collectives; out come pairs of words, in the order in which they
are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphshard.schedule.plan import Direction, GroupInfo, Lane
from graphshard.schedule.reasons import (
    Bound,
    Hold,
    Merge,
    Offloading,
    Reason,
    Recomputation,
    Split,
)
from graphshard.view.marks import Card
from graphshard.view.ranges import groups_text
from graphshard.view.reasons import bound_text, reason_text
from graphshard.view.sheet import CollectiveBar, Sheet
from graphshard.view.text import bytes_text, ranks_of
from graphshard.view.units import rate_text, time_text

KEPT, RESHARDED = "kept until backward", "resharded"
COMPUTED_AGAIN, OFFLOADED = "computed again", "offloaded"


def collective_card(sheet: Sheet, found: CollectiveBar, by_id: Mapping[int, GroupInfo]) -> Card:
    """Bytes, times, slack or exposed time, rate, memory, and why it runs when it does."""
    entry = found.entry
    ranks = ranks_of(found.step, by_id[found.step.groups[0]])
    card = [("bytes", bytes_text(entry.size_bytes))]
    if not found.step.is_copy:
        card += [("dtype", entry.dtype or "as the gradients"), ("ranks", f"{ranks:,}")]
    if sheet.axis.timed:
        card += _times(sheet, found)
        card += _rate(found, ranks)
    else:
        waited = "not within this plan" if found.wait is None else f"step {found.wait}"
        card += [("issued", f"step {found.issue}"), ("waited for", waited)]
    card.append((f"{sheet.alive_word} then", sheet.alive_text(sheet.axis.step_at(found.start))))
    card += why_then(sheet, found)
    card += together(sheet, found)
    card += decisions(sheet, found.step.groups[0], found.direction, gather=_gathers(found))
    return tuple(card)


def _times(sheet: Sheet, found: CollectiveBar) -> Iterator[tuple[str, str]]:
    yield "start", time_text(found.start)
    yield "duration", time_text(found.end - found.start)
    measured_us = sheet.measured_us.get((found.direction, found.step))
    if measured_us is not None:
        yield "measured", time_text(measured_us)
    if found.exposed_us > 0:
        yield "exposed", f"{time_text(found.exposed_us)}: compute waits so long"
    elif found.slack_us is not None:
        yield "slack", f"{time_text(found.slack_us)}: done before its wait"


def _rate(found: CollectiveBar, ranks: int) -> Iterator[tuple[str, str]]:
    """What one rank receives from the others, per time; of a copy, what is copied."""
    took_us = found.end - found.start
    if found.step.is_copy:
        yield "copied at", rate_text(found.entry.size_bytes, took_us)
        return
    rounds = 2 if found.step.lane is Lane.ALL_REDUCE else 1
    received_bytes = rounds * found.entry.size_bytes * (ranks - 1) / ranks
    if took_us > 0 and received_bytes > 0:
        yield "received at", rate_text(received_bytes, took_us)


def wait_card(sheet: Sheet, found: CollectiveBar) -> Card:
    """What compute waits for, how long, and why that was not issued earlier."""
    assert found.wait is not None
    return (
        ("start", time_text(sheet.axis.reached[found.wait])),
        ("exposed", time_text(found.exposed_us)),
        ("issued at", time_text(sheet.axis.done[found.issue])),
        ("runs", f"{time_text(found.start)} to {time_text(found.end)}"),
        (f"{sheet.alive_word} then", sheet.alive_text(found.wait)),
        *why_then(sheet, found),
        *together(sheet, found),
    )


def why_then(sheet: Sheet, found: CollectiveBar, *, cost: bool = True) -> Iterator[tuple[str, str]]:
    """Why the collective is issued where it is, not earlier; cost: and how long compute waits."""
    key = (found.step.groups[0], found.direction, found.step.kind)
    reasons = sheet.not_earlier.get(key)
    if reasons is None:
        return
    # Of the parts of a split group, the one that this is about is waited for as long.
    reason = min(reasons, key=lambda one: abs(one.exposed_us - found.exposed_us))
    if cost or reason.bound in (Bound.PREFETCH_LISTS, Bound.NO_NEED):
        yield "why then", reason_text(reason, sheet.names)
    else:
        yield "why then", bound_text(reason, sheet.names)


def together(sheet: Sheet, found: CollectiveBar) -> Iterator[tuple[str, str]]:
    """Why several groups are one collective: what that saves, and that it delays nothing."""
    groups = found.step.groups
    if len(groups) < 2:
        return
    saved_us = sum(
        reason.launch_us
        for reason in sheet.plan.reasons
        if isinstance(reason, Merge)
        and reason.group in groups
        and (reason.direction, reason.kind) == (found.direction, found.step.kind)
    )
    text = f"one collective carries {len(groups)} groups"
    if saved_us > 0:
        text += f", which saves {time_text(saved_us)} of launches"
    yield "why together", text + _anyway(sheet, found)


def _anyway(sheet: Sheet, found: CollectiveBar) -> str:
    """If the lane goes on without a pause until compute waits for it again, an earlier end of this
    wait would only make that one longer."""
    after = [c for c in sheet.collectives if c.lane == found.lane and c.start >= found.end]
    until, busy = None, found.end
    for one in sorted(after, key=lambda c: c.start):
        if one.start > busy or one.direction is not found.direction:
            break
        busy = one.end
        until = one if one.exposed_us > 0 else until
    if found.exposed_us == 0 or until is None:
        return ""
    names = groups_text([sheet.names[group] for group in until.step.groups])
    return (
        f"; to split it would not help: the lane has no pause until {time_text(until.end)}, when "
        f"compute waits for {names}: less wait here would be more wait there"
    )


def decisions(
    sheet: Sheet, group: int, direction: Direction | None = None, *, gather: bool = True
) -> Iterator[tuple[str, str]]:
    """What was decided for `group`; of merged and split collectives those of `direction` only."""
    for reason in sheet.plan.reasons:
        if (word := _decision(reason, group, direction, gather)) is not None:
            yield word, reason_text(reason, sheet.names)


def _decision(reason: Reason, group: int, direction: Direction | None, gather: bool) -> str | None:
    """What was decided for `group`, in a word; None if the reason is about something else."""
    if isinstance(reason, Hold) and reason.group == group and gather:
        return KEPT if reason.is_kept else RESHARDED
    if isinstance(reason, Recomputation) and reason.group == group and direction is None:
        return COMPUTED_AGAIN
    if isinstance(reason, Offloading) and reason.group == group and direction is None:
        return OFFLOADED
    if isinstance(reason, Merge | Split) and reason.group == group:
        word = "merged" if isinstance(reason, Merge) else "split"
        return word if direction in (None, reason.direction) else None
    return None


def _gathers(found: CollectiveBar) -> bool:
    return found.step.lane is Lane.ALL_GATHER
