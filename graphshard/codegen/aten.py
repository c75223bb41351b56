"""`compute="aten"`: the ops that eager torch runs, where torch's tracing chooses others.

AOTAutograd takes ops apart by rules in Python. They are to say what eager's rules in C++ say, and
do not always: then a bit differs, or a layout that nothing at run time has. True while `as_eager()`
is entered: the ops traced are those that eager runs. `tests/test_eager_ops.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions, get_decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

# Eager's kernel lays its result out as the gradient lies; torch traces a contiguous one, which is
# what the ops give that it takes this one apart into.
OTHER_LAYOUTS = (torch.ops.aten.native_dropout_backward,)


def taken_apart() -> dict[Any, Callable[..., Any]]:
    """Decompositions for AOTAutograd."""
    return get_decompositions(OTHER_LAYOUTS)


@contextmanager
def as_eager() -> Iterator[None]:
    """Only while a graph is traced: Dynamo compiles one graph at a time in a process."""
    before = decompositions.should_fold
    decompositions.should_fold = _is_folded
    try:
        yield
    finally:
        decompositions.should_fold = before


def _is_folded(tensor1: Tensor, tensor2: Tensor, is_out: bool) -> bool:
    """Whether matmul multiplies the larger tensor as one matrix, by one mm and not by a bmm.

    `should_fold` of ATen/native/LinearAlgebra.cpp. torch's copy in Python wants a tensor without
    gaps; this only that the dims before the last can be seen as one.
    """
    is_first = tensor1.ndim >= tensor2.ndim
    larger, smaller = (tensor1, tensor2) if is_first else (tensor2.mT, tensor1)
    if larger.ndim < 3 or smaller.ndim > 2:
        return False
    if smaller.requires_grad and not is_out:
        return True
    if tensor1.ndim == 2:
        return False
    if guard_or_false(larger.numel() == 0):
        return True
    sizes, strides = larger.shape, larger.stride()
    return all(
        guard_or_false(strides[dim] == strides[dim + 1] * sizes[dim + 1])
        for dim in range(larger.ndim - 2)
    )
