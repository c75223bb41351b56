"""The `unshard` mark of a parameter that compute sees as a tensor subclass, for Dynamo.

A parameter that was a DTensor before `fully_shard` is one again, and one with all-gather extensions
is what they make of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2.extensions import NONE, rebuild
from graphshard.fsdp2.layouts import PLAIN, as_dtensor, split_dtensor
from graphshard.graph.marks import REDUCE_GRAD, UNSHARD, seen_as_parameter


class _UnshardSubclass(torch.autograd.Function):
    """The mark on the plain tensor, wrapped; backward marks the plain gradient and its layout.

    Whatever reduces the gradient over the rest of the mesh (a norm's weight under sequence
    parallel) happens when the group reduces, as in FSDP2. `DTensor.from_local` would do it at
    once, over the data-parallel dims of the mesh too.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, mark: tuple[Any, ...], extension: int, layout: int
    ) -> Tensor:
        ctx.save_for_backward(anchor)
        ctx.index = mark[-1]
        ctx.set_materialize_grads(False)  # as in `graphshard.graph.marks`
        whole: Tensor = UNSHARD(anchor, *mark)
        if extension != NONE:
            whole = rebuild(whole, extension)
        return whole if layout == PLAIN else as_dtensor(whole, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        (anchor,) = ctx.saved_tensors
        local, layout = split_dtensor(grad)
        return REDUCE_GRAD(local, anchor, ctx.index, layout), None, None, None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def unshard_subclass(anchor: Tensor, mark: tuple[Any, ...], extension: int, layout: int) -> Tensor:
    """`unshard(anchor, *mark)` as the numbered extension makes it, in the numbered layout."""
    whole: Tensor = _UnshardSubclass.apply(anchor, mark, extension, layout)  # type: ignore[no-untyped-call]
    return seen_as_parameter(whole)
