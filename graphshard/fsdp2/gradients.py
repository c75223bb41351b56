"""Gradients that wait between two micro-steps, in the places where FSDP2 itself keeps them.

Eager and compiled micro-steps may therefore follow each other in any order, and FSDP2's own
methods (`reset_iter_state`, `finalize_backward`) find what they look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2 import versions
from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.param import FsdpParam


def take_all_unreduced(group: FsdpGroup, indices: Sequence[int]) -> dict[int, Tensor]:
    """What `take_unreduced` finds of parameters `indices`, by index: nothing, unless steps went
    without sync."""
    raws = [(index, group.params[index].raw) for index in indices]
    found = [(i, take_unreduced(raw)) for i, raw in raws if hasattr(raw, "_unsharded_param")]
    return {index: grad for index, grad in found if grad is not None}


def take_unreduced(raw: Any) -> Tensor | None:
    """The unsharded gradient that micro-steps left without reducing; it is cleared there."""
    leaf = getattr(raw, "_unsharded_param", None)
    if leaf is None:
        return None
    if not versions.GRADS_HAVE_DTYPES and raw.unsharded_accumulated_grad is not None:
        grad = raw.unsharded_accumulated_grad
        raw.unsharded_accumulated_grad = None
    else:
        grad, leaf.grad = leaf.grad, None
    return grad  # type: ignore[no-any-return]


def leave_unreduced(group: FsdpGroup, param: FsdpParam, grad: Tensor) -> None:
    """Keep an unsharded gradient (of `param.as_accumulated`'s dtype) for a later micro-step."""
    raw = param.raw
    leaf = _leaf(group, param)
    if not versions.GRADS_HAVE_DTYPES and grad.dtype != leaf.dtype:
        # Beside the parameter, whose own `.grad` has to be of its dtype.
        raw.unsharded_accumulated_grad = grad
    else:
        leaf.grad = grad
    if versions.BACKWARD_MAY_BE_PENDING:
        group.raw._post_backward_pending = True


def nothing_unreduced(group: FsdpGroup) -> None:
    """Tell FSDP2 that all gradients of `group` are on their way."""
    if versions.BACKWARD_MAY_BE_PENDING:
        group.raw._post_backward_pending = False


def mark_gathered(group: FsdpGroup) -> None:
    """Let FSDP2 know that the group was gathered: it reduces zeros only for such groups."""
    for param in group.params:
        _leaf(group, param)


def take_partial(
    group: FsdpGroup, params: Sequence[FsdpParam], dtype: torch.dtype
) -> Tensor | None:
    """What earlier micro-steps reduce-scattered and HSDP has still to all-reduce, flat.

    params: those that are reduced now, in packing order. Cleared there.
    """
    raw = group.raw
    if versions.PARTIAL_GRADS_ARE_BY_PARAM:
        sizes = [p.padded_numel for p in params]
        partial = raw._prepare_partial_reduce_output([p.raw for p in params], sizes, dtype)
    else:
        partial = raw._partial_reduce_output
    raw._partial_reduce_output = None
    return partial  # type: ignore[no-any-return]


def leave_partial(group: FsdpGroup, output: Tensor) -> None:
    """Keep a reduce-scattered gradient until `set_requires_all_reduce(True)`."""
    group.raw._partial_reduce_output = output


def reduced_as_zeros(group: FsdpGroup) -> list[int]:
    """Places of parameters that are reduced without a gradient of their own, as zeros.

    All trainable ones, if other ranks may use what this one does not
    (`set_reduce_scatter_unused_params`), and those of which HSDP has still to all-reduce a part
    (torch >= 2.15: before, it is known only by its place in the packed buffer).
    """
    unused, partial = group.reduces_unused, None
    if versions.PARTIAL_GRADS_ARE_BY_PARAM:
        partial = group.raw._get_partial_reduce_grad
    if not unused and partial is None:
        return []
    return [
        index
        for index, raw in enumerate(group.raw.fsdp_params)
        if (partial is not None and partial(raw) is not None)
        or (unused and raw.sharded_param.requires_grad)
    ]


def forget(group: FsdpGroup) -> None:
    """Drop everything that waits, as after a failed backward."""
    take_all_unreduced(group, range(len(group.params)))
    group.raw._partial_reduce_output = None
    nothing_unreduced(group)


def _leaf(group: FsdpGroup, param: FsdpParam) -> Any:
    """FSDP2's unsharded parameter, made (without memory of its own) if it never was."""
    raw = param.raw
    if not hasattr(raw, "_unsharded_param"):
        if param.extension is None:
            dtype = raw.param_dtype or raw.orig_dtype
            raw.init_all_gather_outputs(
                [param.padded_numel], [dtype], group.world_size, group.device
            )
            raw.init_unsharded_param()
            raw.free_unsharded_param()
        else:
            raw._unsharded_param = param.spare_leaf
    param.spare_leaf = None
    return raw._unsharded_param
