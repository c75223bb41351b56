"""Gradients that wait between two micro-steps, in the places where FSDP2 itself keeps them.

Eager and compiled micro-steps may therefore follow each other in any order, and FSDP2's own
methods (`reset_iter_state`, `finalize_backward`) find what they look for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.param import FsdpParam


def take_unreduced(param: FsdpParam) -> Tensor | None:
    """The unsharded gradient that micro-steps left without reducing; it is cleared there."""
    raw = param.raw
    leaf = getattr(raw, "_unsharded_param", None)
    if leaf is None:
        return None
    if _has_own_place(raw) and raw.unsharded_accumulated_grad is not None:
        grad = raw.unsharded_accumulated_grad
        raw.unsharded_accumulated_grad = None
    else:
        grad, leaf.grad = leaf.grad, None
    return grad  # type: ignore[no-any-return]


def leave_unreduced(group: FsdpGroup, param: FsdpParam, grad: Tensor) -> None:
    """Keep an unsharded gradient (of `param.as_accumulated`'s dtype) for a later micro-step."""
    raw = param.raw
    leaf = _leaf(group, raw)
    if _has_own_place(raw) and grad.dtype != leaf.dtype:
        raw.unsharded_accumulated_grad = grad
    else:
        leaf.grad = grad
    if hasattr(group.raw, "_post_backward_pending"):  # torch >= 2.15
        group.raw._post_backward_pending = True


def nothing_unreduced(group: FsdpGroup) -> None:
    """Tell FSDP2 that all gradients of `group` are on their way."""
    if hasattr(group.raw, "_post_backward_pending"):  # torch >= 2.15
        group.raw._post_backward_pending = False


def mark_gathered(group: FsdpGroup) -> None:
    """Let FSDP2 know that the group was gathered: it reduces zeros only for such groups."""
    for param in group.params:
        _leaf(group, param.raw)


def take_partial(
    group: FsdpGroup, params: Sequence[FsdpParam], dtype: torch.dtype
) -> Tensor | None:
    """What earlier micro-steps reduce-scattered and HSDP has still to all-reduce, flat.

    params: those that are reduced now, in packing order. Cleared there.
    """
    raw = group.raw
    if hasattr(raw, "_prepare_partial_reduce_output"):  # torch >= 2.15
        sizes = [math.prod(p.padded_shard_size) for p in params]
        partial = raw._prepare_partial_reduce_output([p.raw for p in params], sizes, dtype)
    else:
        partial = raw._partial_reduce_output
    raw._partial_reduce_output = None
    return partial  # type: ignore[no-any-return]


def leave_partial(group: FsdpGroup, output: Tensor) -> None:
    """Keep a reduce-scattered gradient until `set_requires_all_reduce(True)`."""
    group.raw._partial_reduce_output = output


def waits_for_all_reduce(group: FsdpGroup, param: FsdpParam) -> bool:
    """An earlier micro-step's gradient of `param` is part of what HSDP has still to all-reduce."""
    pending = getattr(group.raw, "_get_partial_reduce_grad", None)  # torch >= 2.15
    return pending is not None and pending(param.raw) is not None


def forget(group: FsdpGroup) -> None:
    """Drop everything that waits, as after a failed backward."""
    for param in group.params:
        take_unreduced(param)
    group.raw._partial_reduce_output = None
    nothing_unreduced(group)


def _has_own_place(raw: Any) -> bool:
    """torch < 2.15 keeps gradients that are not of the parameter's dtype beside the parameter."""
    return "unsharded_accumulated_grad" in vars(raw)


def _leaf(group: FsdpGroup, raw: Any) -> Any:
    """FSDP2's unsharded parameter, made (without memory of its own) if it never was."""
    if not hasattr(raw, "_unsharded_param"):
        dtype = raw.param_dtype or raw.orig_dtype
        numel = math.prod(raw.padded_sharded_param_size)
        raw.init_all_gather_outputs([numel], [dtype], group.world_size, group.device)
        raw.init_unsharded_param()
        raw.free_unsharded_param()
    return raw._unsharded_param
