"""What the colours and the words of a page mean: shown on hover and on focus.

In come the kinds of marks that a page has; out come `Term`s.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """kind: a CSS class, or "" for a word without a colour."""

    kind: str
    name: str
    meaning: str


LANES = (
    Term("forward", "forward", "compute of forward: the GPU's kernels, in the order of the graph"),
    Term("backward", "backward", "compute of backward, with what it computes again"),
    Term("wait", "compute waits (exposed)", "the compute stream does nothing, since a collective "
         "whose result it needs next is not done: time that a better overlap would save"),
    Term("copy", "copies into and out of buckets", "kernels that copy parameters or gradients "
         "between their own tensors and the buffer of a collective"),
    Term("optimizer", "optimizer", "the optimizer's step on this rank's shards, after backward; "
         "the schedule does not change it"),
    Term("gather", "all-gather", "every rank receives the other ranks' shards of the parameters "
         "of a group, which are whole afterwards"),
    Term("reduce", "reduce-scatter", "gradients are summed over the ranks, and each rank keeps "
         "its shard of the sum"),
    Term("all-reduce", "all-reduce over replicas", "sums the gradient shards of the replicas "
         "(hybrid sharding)"),
    Term("offload", "copies to the host and back", "activations that the host holds from forward "
         "to backward"),
    Term("unknown", "measured, not attributed", "the whole measured step took so much longer than "
         "the parts that were timed one by one"),
)  # fmt: skip
RESIDENCY = (
    Term("held", "gathered", "from the issue of a group's all-gather to its release: so long the "
         "whole parameters take memory"),
    Term("kept", "kept until backward", "not released after forward, so that backward needs no "
         "all-gather: memory for time"),
)  # fmt: skip
UNTIMED = (
    Term("kept", "kept from forward", "found still gathered: no all-gather runs"),
)  # fmt: skip
AGGREGATED = Term(
    "cells", "narrow ones together", "where segments are narrower than a few pixels they are drawn "
    "together, each kind as high as its share of the time there (of memory: the areas are means, "
    "the line is the most); zooming in draws each",
)  # fmt: skip
CATEGORIES = {
    "Sharded Param": "this rank's shards of the parameters",
    "Sharded Grad": "this rank's shards of the gradients",
    "OptState": "the optimizer's state of this rank's shards",
    "Unsharded Param": "whole parameters of the groups that are gathered",
    "Unsharded Grad": "whole gradients that are not reduced yet",
    "All Gather": "buffers of all-gathers that run or are being copied out of",
    "Reduce Scatter": "buffers of reduce-scatters",
    "Activation": "what forward saves for backward",
    "Temp": "what ops need while they run",
    "Buffer": "the model's buffers",
    "Inputs": "the batch",
}
WORDS = {
    "step": "one optimizer step as predicted: forward, backward and the optimizer",
    "exposed communication": "how long compute waits for collectives, of one step",
    "peak memory": "the most bytes that are alive at once on one rank",
    "no schedule is below": "compute without any wait, or the network without any pause, whichever "
    "takes longer: no order of this graph's collectives is faster, whatever its memory",
}


def lane_terms(kinds: Collection[str], *, timed: bool) -> list[Term]:
    """Those that the lanes show."""
    found = [term for term in LANES if term.kind in kinds]
    return [*found, AGGREGATED] if timed else [*found, *(t for t in UNTIMED if t.kind in kinds)]


def residency_terms(kinds: Collection[str]) -> list[Term]:
    return [term for term in RESIDENCY if term.kind in kinds]
