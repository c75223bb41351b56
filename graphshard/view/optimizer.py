"""The time of a step, and the optimizer's part of it, in words."""

from __future__ import annotations

from graphshard.schedule.plan import Estimate, OptimizerStep
from graphshard.view.units import share_text, time_text


def optimizer_text(estimate: Estimate) -> str:
    """Its share of the plan's step, and what it is: "4.0 %: adamw, clipped"."""
    assert estimate.optimizer is not None
    return f"{_share_text(estimate)}: {name_text(estimate.optimizer)}"


def name_text(optimizer: OptimizerStep) -> str:
    return f"{optimizer.kind}, clipped" if optimizer.clips else str(optimizer.kind)


def took_text(estimate: Estimate) -> str:
    """Its time, and the share of the plan's whole step: "31.0 ms (4.0 %)"."""
    return f"{time_text(estimate.optimizer_us)} ({_share_text(estimate)})"


def _share_text(estimate: Estimate) -> str:
    return share_text(estimate.optimizer_us, estimate.whole_step_us)


def step_line(estimate: Estimate) -> str:
    """ "step 776 ms, of it optimizer 31.0 ms (4.0 %); FSDP2 901 ms": as predicted. Without an
    optimizer it is forward and backward."""
    own, theirs = time_text(estimate.whole_step_us), time_text(estimate.whole_fsdp2_us)
    if estimate.optimizer is None:
        return f"forward and backward {own}; FSDP2 {theirs}"
    part = f"of it optimizer {took_text(estimate)}"
    return f"step {own}, {part}; FSDP2 {theirs}"
