"""The two mark ops that capture leaves in a graph. They carry meaning, never run.

`unshard(anchor, size, dtype, device, index)` stands for "parameter `index` of the anchor's
group, gathered": a fresh tensor of `size` and `dtype`. `reduce_grad(grad, anchor, index, layout)`
is its derivative: it stands for "this gradient is to be reduced", and returns a scalar token which
becomes the anchor's gradient, so that nothing drops the reduction as dead code. `layout` is -1, or
says which DTensor `grad` is the local part of (see `graphshard.fsdp2.layouts`).

The anchor is a scalar CPU tensor whose value is the number of its group (see
`graphshard.runtime.registry`). It is a graph input, not a constant, so that identical blocks
share one compiled graph. It requires grad for trainable parameters and not for frozen ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphshard.errors import CaptureError

_LIBRARY = torch.library.Library("graphshard", "DEF")
_LIBRARY.define(
    "unshard(Tensor anchor, SymInt[] size, ScalarType dtype, Device device, int index) -> Tensor"
)
_LIBRARY.define("reduce_grad(Tensor grad, Tensor anchor, int index, int layout=-1) -> Tensor")

_NEVER_RUNS = (
    "a {} mark was executed: the graph that holds it was not compiled by graphshard; "
    "do not run a graph captured for graphshard with another compiler"
)


def seen_as_parameter(gathered: Tensor) -> Tensor:
    """`gathered`, which Dynamo takes for the parameter that it stands for: a forward may ask for
    its type."""
    gathered._is_param = True
    return gathered


def _unshard_fake(
    anchor: Tensor, size: list[int], dtype: torch.dtype, device: torch.device, index: int
) -> Tensor:
    return seen_as_parameter(torch.empty(size, dtype=dtype, device=device))


def _reduce_grad_fake(grad: Tensor, anchor: Tensor, index: int, layout: int = -1) -> Tensor:
    return anchor.new_empty(())


def _unshard_kernel(*args: Any) -> Tensor:
    raise CaptureError("GS201", _NEVER_RUNS.format("graphshard::unshard"))


def _reduce_grad_kernel(*args: Any) -> Tensor:
    raise CaptureError("GS201", _NEVER_RUNS.format("graphshard::reduce_grad"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.index = inputs[4]
    # What uses a parameter may give it no gradient. Eager FSDP2 has none then, and not zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    (anchor,) = ctx.saved_tensors
    return UNSHARD_GRADIENT(grad, anchor, ctx.index), None, None, None, None


torch.library.register_fake("graphshard::unshard", _unshard_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::reduce_grad", _reduce_grad_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "graphshard::unshard", _backward, setup_context=_setup_context, lib=_LIBRARY
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("unshard", _unshard_kernel, _key)
    _LIBRARY.impl("reduce_grad", _reduce_grad_kernel, _key)

UNSHARD_GRADIENT = torch.ops.graphshard.reduce_grad

UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default
