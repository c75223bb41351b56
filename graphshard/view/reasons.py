"""The reasons of a plan as sentences: numbers in the units of the views, groups by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphshard.schedule.plan import Origin, StepKind
from graphshard.schedule.reasons import (
    Bound,
    Decision,
    ExchangeRate,
    Gain,
    Hold,
    HoldRule,
    Merge,
    NotEarlier,
    Offloading,
    Reason,
    Recomputation,
    Split,
)
from graphshard.view.ranges import groups_text
from graphshard.view.text import bytes_text, count_text
from graphshard.view.units import time_text

DECISIONS = {
    Decision.COMPUTES_AGAIN: "other activations saved or computed again",
    Decision.SEPARATE_GROUP: "reductions on a process group of their own",
    Decision.IN_PLACE: "collectives in place, without copies",
    Decision.KEPT: "what stays gathered",
    Decision.ON_NODE: "shards that the ranks of a node hold until backward",
    Decision.ALL_REDUCES: "all-reduces issued where their reduce-scatter is waited for",
    Decision.BUCKETS: "merged and split collectives",
    Decision.RECOMPUTE: "recomputation of activations",
    Decision.OFFLOAD: "activations that the host holds until backward",
    Decision.REDUCTIONS: "order and waits of reductions",
    Decision.GATHERS: "issue points of gathers",
}
RULES = {HoldRule.USER: "; reshard_after_forward decides", HoldRule.FSDP2: "; as in FSDP2"}
BOUNDS = {
    Bound.PREFETCH_LISTS: "bound by the user's prefetch lists",
    Bound.GRADIENTS: "its gradients are complete only here",
    Bound.REDUCED: "its reduce-scatter is waited for only here",
    Bound.ACTIVATIONS: "what it copies is complete only here",
    Bound.FIRST: "it is issued at the very start, with no compute before it to hide it",
    Bound.LANE_FREE: "it starts as soon as its lane is free",
    Bound.NOT_SHORTER: "an earlier issue did not make the simulated step shorter",
}
KINDS = {StepKind.GATHER_ISSUE: "gathers", StepKind.REDUCE_ISSUE: "reductions"}

BUSY: Mapping[StepKind | None, str] = {
    StepKind.GATHER_ISSUE: "the gather",
    StepKind.ALL_REDUCE_ISSUE: "the all-reduce",
    StepKind.OFFLOAD_ISSUE: "the offload",
    StepKind.RELOAD_ISSUE: "the reload",
}


def reason_text(reason: Reason, names: Mapping[int, str]) -> str:
    """One sentence, without the group that it is about. names: of groups, by their ids."""
    match reason:
        case Gain():
            return f"{DECISIONS[reason.decision]}: {_saved(reason)}"
        case Hold():
            return _hold(reason)
        case Merge():
            kind, launch = KINDS[reason.kind], time_text(reason.launch_us)
            return f"asked to share one of the {kind}: a launch of {launch} less"
        case Split():
            kind, launch = KINDS[reason.kind], time_text(reason.launch_us)
            return f"{reason.num_parts} {kind}: {reason.num_parts - 1} launches of {launch} more"
        case Recomputation():
            return _recomputation(reason)
        case Offloading():
            away, held = count_text(len(reason.away), "activation"), bytes_text(reason.size_bytes)
            return f"the host holds {away} ({_origins(reason.away)}) until backward: {held}"
        case ExchangeRate():
            return _exchange_rate(reason)
        case NotEarlier():
            return _not_earlier(reason, names)


def _saved(gain: Gain) -> str:
    if gain.gain_us == 0:
        verb = "takes" if gain.gain_bytes < 0 else "frees"
        return f"{verb} {bytes_text(abs(gain.gain_bytes))} of the peak"
    verb = "costs" if gain.gain_us < 0 else "saves"
    return f"{verb} {time_text(abs(gain.gain_us))} of {time_text(gain.of_us)}"


def _hold(reason: Hold) -> str:
    """What was done, or what the other way would have done."""
    saved, held = time_text(reason.saved_us), bytes_text(reason.held_bytes)
    over = f"{held} for {time_text(reason.held_us)} of compute"
    if reason.is_kept:
        holds = f"holds {over}" if reason.held_us else "backward begins with it"
        text = f"saves {saved} of gathers, {holds}"
    else:
        text = f"kept, it would save {saved} of gathers, and hold {over}"
    if reason.across:
        text += "; kept between micro-steps too"
    if reason.on_node:
        text += "; the ranks of each node hold a shard of it instead"
    return text + ("" if reason.rule is None else RULES[reason.rule])


def _recomputation(reason: Recomputation) -> str:
    extra, freed = time_text(reason.extra_us), bytes_text(reason.saved_bytes)
    of_all = count_text(reason.num_options, "activation")
    again = f"{len(reason.again)} of {of_all} ({_origins(reason.again)})"
    saved = f"; saved: {_origins(reason.saved)}" if reason.saved else ""
    return f"computes again {again}: at most {extra} more, {freed} less{saved}"


def _origins(origins: Sequence[Origin]) -> str:
    """Each module once, with its ops."""
    by_module: dict[str, list[str]] = {}
    for origin in origins:
        by_module.setdefault(origin.module, []).append(origin.op.strip("_"))
    return "; ".join(f"{module} {', '.join(ops)}".strip() for module, ops in by_module.items())


def _exchange_rate(reason: ExchangeRate) -> str:
    taken, left = (
        None if us is None else f"{time_text(us)} for each GiB"
        for us in (reason.taken_us_per_gib, reason.left_us_per_gib)
    )
    if taken is None:
        return f"nothing is computed again; the cheapest activation would take {left}"
    text = f"what is computed again takes at most {taken} that it frees"
    return text if left is None else f"{text}; of what is saved the cheapest would take {left}"


def _not_earlier(reason: NotEarlier, names: Mapping[int, str]) -> str:
    if reason.bound is Bound.PREFETCH_LISTS:
        return BOUNDS[reason.bound]
    if reason.bound is Bound.NO_NEED:
        return f"no need: it is done {time_text(reason.spare_us)} before compute waits for it"
    return f"compute waits {time_text(reason.exposed_us)} for it, but {bound_text(reason, names)}"


def bound_text(reason: NotEarlier, names: Mapping[int, str]) -> str:
    """Of what compute waits for: what keeps it from being earlier."""
    if reason.bound is Bound.LANE_BUSY:
        until = f"{time_text(reason.until_us)} of {reason.direction}"
        return f"the lane is busy with {_busy(reason, names)} until {until}"
    if reason.bound is Bound.MEMORY:
        held = ", ".join(f"{h.category} holds {bytes_text(h.bytes)}" for h in reason.held)
        missing = bytes_text(reason.missing_bytes)
        return f"{missing} of the limit are missing before: {held}"
    return BOUNDS[reason.bound]


def _busy(reason: NotEarlier, names: Mapping[int, str]) -> str:
    kind = BUSY.get(reason.busy_kind, "the reduction")
    return f"{kind} of {groups_text([names[number] for number in reason.busy])}"
