"""Which gradients are reduced when some of a group come.

In: gradients of one call, in a backward that may have more of them. Out: those that are to be
reduced now, with what earlier micro-steps left; the rest waits, with the group or with FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphshard.fsdp2 import FsdpGroup, gradients
from graphshard.fsdp2.layouts import copy_of
from graphshard.runtime.calls import current_task, more_calls_ahead
from graphshard.runtime.live import LiveGroup


def collect(
    live: LiveGroup, grads: Mapping[int, Tensor], part: tuple[int, ...]
) -> Mapping[int, Tensor]:
    """What is to be reduced now that `grads` have come: nothing while more is to come.

    part: the parameters that this is about; empty: all of the group.
    """
    about = part or live.places
    if live.arrived and live.arrived_in != current_task():
        live.arrived = {}
    before = {i: live.arrived.pop(i) for i in about if i in live.arrived}
    grads = merge(before, live.fsdp.as_autograd_gives(grads))
    if more_calls_ahead(live):
        live.arrived.update(grads)
        live.arrived_in = current_task()
        return {}
    if live.fsdp.reduces:
        return merge_unreduced(live.fsdp, grads, about)
    keep_unreduced(live, grads)
    return {}


def merge(first: Mapping[int, Tensor], second: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Sums by parameter index, in autograd's order of addition."""
    if not first:
        return second
    total = dict(first)
    for index, grad in second.items():
        total[index] = total[index] + grad if index in total else grad
    return dict(sorted(total.items()))


def merge_unreduced(
    fsdp: FsdpGroup, grads: Mapping[int, Tensor], about: Sequence[int]
) -> dict[int, Tensor]:
    """Add to `grads` what earlier micro-steps left unreduced of parameters `about`, compiled or
    eager.

    Returns all (local) gradients by parameter index in packing order; clears what it takes.
    """
    merged = dict(merge(gradients.take_all_unreduced(fsdp, about), grads))
    if fsdp.has_dtensors:
        merged = {i: fsdp.params[i].local_gradient(grad) for i, grad in merged.items()}
    for index in gradients.reduced_as_zeros(fsdp):
        if index in about and index not in merged:
            param = fsdp.params[index]
            merged[index] = torch.zeros(param.size, dtype=param.dtype, device=fsdp.device)
    if fsdp.reduces_unused:
        gradients.mark_gathered(fsdp)
    gradients.nothing_unreduced(fsdp)
    return {index: merged[index] for index in fsdp.reduce_order() if index in merged}


def keep_unreduced(live: LiveGroup, grads: Mapping[int, Tensor]) -> None:
    """`set_requires_gradient_sync(False)`: leave unsharded gradients with FSDP2."""
    for index, grad in grads.items():
        param = live.fsdp.params[index]
        before = gradients.take_unreduced(param.raw)
        accumulated = param.as_accumulated(grad if before is None else before + grad)
        # A gradient may share memory with another tensor of the graph (an expanded sum).
        gradients.leave_unreduced(
            live.fsdp, param, copy_of(accumulated) if accumulated is grad else accumulated
        )
