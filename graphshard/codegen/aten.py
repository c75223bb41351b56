"""`compute="aten"`: the ops that eager torch runs, where torch's tracing chooses others.

AOTAutograd takes ops apart by rules in Python. They are to say what eager's rules in C++ say, and
do not always, and then a bit differs. True while `as_eager()` is entered: the ops traced are those
that eager runs. `tests/test_eager_ops.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

from graphshard.codegen.emit import emit

Kernel: TypeAlias = Callable[..., Any]
_aten = torch.ops.aten
_PYTHON = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

# Ops with a kernel in Python that traces many others, whose results differ in the last bits, and
# one in C++ that eager runs. The latter knows no symbols: interpolation of these is torch's.
IN_PYTHON_TOO = (
    _aten.upsample_linear1d.default,
    _aten.upsample_bilinear2d.default,
    _aten.upsample_bicubic2d.default,
    _aten.upsample_trilinear3d.default,
    _aten.multi_margin_loss.default,
    _aten.multilabel_margin_loss_forward.default,
)
WITH_SIZES = {
    _aten.upsample_linear1d.vec: _aten.upsample_linear1d.default,
    _aten.upsample_bilinear2d.vec: _aten.upsample_bilinear2d.default,
    _aten.upsample_bicubic2d.vec: _aten.upsample_bicubic2d.default,
    _aten.upsample_trilinear3d.vec: _aten.upsample_trilinear3d.default,
}


def emit_ops(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The boxed callable of one direction. A view copies where it has to, as eager's reshape does:
    some kernels lay their results out otherwise than torch traced them."""
    for node in module.graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
    return emit(module)


@contextmanager
def as_eager() -> Iterator[None]:
    """Only while a graph is traced: Dynamo compiles one graph at a time in a process.

    On a GPU torch gives random ops that are computed again a generator of their own, which CUDA
    graphs need; here they draw from the device's, as they do in eager.
    """
    before = decompositions.should_fold
    decompositions.should_fold = _is_folded
    try:
        with ExitStack() as kernels:
            kernels.enter_context(
                torch._functorch.config.patch(graphsafe_rng_functionalization=False)
            )
            for op in IN_PYTHON_TOO:
                kernels.enter_context(_python_kernels(op, lambda _: None))
            for op, resolved in WITH_SIZES.items():
                kernels.enter_context(_python_kernels(op, partial(_or_with_sizes, resolved)))
            yield
    finally:
        decompositions.should_fold = before


@contextmanager
def _python_kernels(op: Any, other: Callable[[Kernel], Kernel | None]) -> Iterator[None]:
    """Inside, tracing runs what `other` makes of the kernels of `op` in Python, or what eager runs
    where that is None."""
    before = {key: op.py_kernels[key] for key in _PYTHON if key in op.py_kernels}
    for key, kernel in before.items():
        instead = other(kernel)
        if instead is None:
            del op.py_kernels[key]
        else:
            op.py_kernels[key] = instead
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def _or_with_sizes(resolved: Kernel, kernel: Kernel) -> Kernel:
    """`F.interpolate` with a size or with factors."""

    def call(tensor: Tensor, size: Any, align_corners: bool, factors: Any) -> Any:
        if any(isinstance(length, torch.SymInt) for length in (*tensor.size(), *(size or ()))):
            return kernel(tensor, size, align_corners, factors)
        found = decompositions.upsample_compute_output_size(tensor.size(), size, factors)
        return resolved(tensor, found, align_corners, *(factors or [None] * len(found)))

    return call


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
