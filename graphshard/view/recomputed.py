"""What backward computes again or the host holds, and what became of the user's checkpoints, in one
sentence."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.schedule.plan import Activation, Plan
from graphshard.schedule.reasons import Decision, Gain
from graphshard.view.text import bytes_text, count_text
from graphshard.view.units import time_text


def recomputed_text(plan: Plan) -> str:
    """Empty where all is saved as in eager and nothing was checkpointed."""
    own = plan.recompute
    held = bytes_text(sum(group.offloaded_bytes for group in plan.groups))
    parts = (
        _of_groups(own.activations, "computed again"),
        _of_groups(own.offloaded, f"offloaded ({held})"),
    )
    again = ", ".join(part for part in parts if part)
    regions = "checkpointed regions"
    if own.checkpoints:
        regions = count_text(own.checkpoints, "checkpointed region")
    if own.replaced:
        return f"{regions} replaced by the plan ({again or 'nothing computed again'}){_gain(plan)}"
    if not own.checkpoints:
        return again
    return f"{regions} as the model has them{again and f', and {again}'}"


def _of_groups(activations: Sequence[Activation], what: str) -> str:
    if not activations:
        return ""
    groups = count_text(len({activation.group for activation in activations}), "group")
    return f"{count_text(len(activations), 'activation')} of {groups} {what}"


def _gain(plan: Plan) -> str:
    """Over FSDP2 with the user's checkpoints, in its own order of collectives."""
    gains = (reason for reason in plan.reasons if isinstance(reason, Gain))
    found = next((gain for gain in gains if gain.decision is Decision.COMPUTES_AGAIN), None)
    if found is None:
        return ""
    time = f"{time_text(abs(found.gain_us))} {_way(found.gain_us)}"
    memory = f"{bytes_text(abs(found.gain_bytes))} {_way(found.gain_bytes)} memory"
    return f": in FSDP2's order {time} a step, {memory}"


def _way(gain: float) -> str:
    return "less" if gain >= 0 else "more"
