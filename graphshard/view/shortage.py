"""Why no schedule fits a budget, in sentences: as the text of an error, and as a screen."""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.schedule.estimate import Allocation
from graphshard.schedule.shortage import Held, Help, Remedy, Shortage
from graphshard.view.text import bytes_text

MOST_NAMES = 4
MOST_HELD = 2
# Of less than this share of the least peak nobody needs to hear.
WORTH_SAYING = 0.05
LOSS = "_log_softmax"  # of cross entropy; attention takes `_softmax`


def shortage_text(shortage: Shortage) -> str:
    """All of it, for an error's message."""
    owners = "; ".join(_owner(shortage, owner) for owner in shortage.owners)
    held = "".join(f". {line}" for line in _held(shortage))
    helps = "; ".join(_help(shortage, one) for one in shortage.helps)
    return f"{_what(shortage)}; {_where(shortage)}: {owners}{held}. What would help: {helps}"


def shortage_lines(shortage: Shortage) -> list[str]:
    """What and where, who holds the bytes, what would help; one line for each."""
    return [
        _what(shortage),
        f"  {_where(shortage)}",
        *(f"    {_owner(shortage, owner)}" for owner in shortage.owners),
        *(f"  {line}" for line in _held(shortage)),
        "  what would help",
        *(f"    {_help(shortage, one)}" for one in shortage.helps),
    ]


def _what(shortage: Shortage) -> str:
    return f"no schedule fits a memory budget of {bytes_text(shortage.budget_bytes)}"


def _where(shortage: Shortage) -> str:
    least, theirs = bytes_text(shortage.least_bytes), bytes_text(shortage.fsdp2_bytes)
    own = f"the least feasible peak is {least} (FSDP2's own schedule: {theirs})"
    return f"{own}, in {shortage.direction}, {_moment(shortage)}"


def _moment(shortage: Shortage) -> str:
    step = shortage.step
    if step.group is None:
        return f"during compute ops {step.start} to {step.stop - 1}"
    return f"at the {step.kind.replace('_', ' ')} of {_name(shortage, step.group)}"


def _owner(shortage: Shortage, owner: Allocation) -> str:
    """ "1.0 KiB of Activation" or "64 B of All Gather (layers.0)"."""
    whose = "" if owner.group is None else f" ({_name(shortage, owner.group)})"
    return f"{bytes_text(owner.bytes)} of {owner.category}{whose}"


def _held(shortage: Shortage) -> Iterator[str]:
    """What of the activations no plan can free, and whose wish that is."""
    least_bytes = WORTH_SAYING * shortage.least_bytes
    wanted_bytes = sum(held.size_bytes for held in shortage.held if held.wanted)
    if wanted_bytes > least_bytes:
        yield (
            f"{bytes_text(wanted_bytes)} are saved since the model's checkpoint policy says "
            "MUST_SAVE; PREFER_SAVE leaves it to the plan"
        )
    others = [h for h in shortage.held if not h.wanted and h.size_bytes > least_bytes]
    for held in others[:MOST_HELD]:
        origin = held.origin
        whose = f"of {origin.op}" + (f" in {origin.module}" if origin.module else "")
        times = f" ({held.count} of them)" if held.count > 1 else ""
        yield f"{bytes_text(held.size_bytes)}{times} are results {whose}, always saved{_cure(held)}"


def _cure(held: Held) -> str:
    if held.origin.op != LOSS:
        return ""
    return ": the logits of the loss; computed in chunks of tokens it holds less"


def _help(shortage: Shortage, one: Help) -> str:
    if one.remedy is Remedy.UNIT:
        hint = "since a number without a unit means bytes"
        return f"memory_budget='{shortage.budget_bytes}GiB', {hint}"
    if one.remedy is Remedy.BUDGET:
        return f"a budget of {bytes_text(one.peak_bytes)} ({one.peak_bytes:,} bytes)"
    less = bytes_text(shortage.least_bytes - one.peak_bytes)
    peak = f"least peak {bytes_text(one.peak_bytes)} ({less} less)"
    return f"{_change(shortage, one)}: {peak}"


def _change(shortage: Shortage, one: Help) -> str:
    if one.remedy is Remedy.HALF_THE_BATCH:
        return "half the batch"
    if one.remedy is Remedy.SYNC_EACH:
        return "gradient sync in every micro-step"
    names = ", ".join(_name(shortage, group) for group in one.groups[:MOST_NAMES])
    return f"reshard_after_forward=True on {names}{', ...' if one.groups[MOST_NAMES:] else ''}"


def _name(shortage: Shortage, group: int) -> str:
    return dict(shortage.names)[group] or "the root"
