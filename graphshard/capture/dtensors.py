"""The `unshard` mark of a parameter that was a DTensor before `fully_shard`, as Dynamo sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2.layouts import as_dtensor, split_dtensor
from graphshard.graph.marks import REDUCE_GRAD, UNSHARD


class _UnshardDTensor(torch.autograd.Function):
    """The mark on the local tensor, wrapped; backward marks the local gradient and its layout.

    Whatever reduces the gradient over the rest of the mesh (a norm's weight under sequence
    parallel) happens when the group reduces, as in FSDP2. `DTensor.from_local` would do it at
    once, over the data-parallel dims of the mesh too.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, mark: tuple[Any, ...], layout: int) -> Tensor:
        ctx.save_for_backward(anchor)
        ctx.index = mark[-1]
        return as_dtensor(UNSHARD(anchor, *mark), layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        local, layout = split_dtensor(grad)
        return REDUCE_GRAD(local, anchor, ctx.index, layout), None, None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def unshard_dtensor(anchor: Tensor, mark: tuple[Any, ...], layout: int) -> Tensor:
    """`unshard(anchor, *mark)` as a DTensor of the numbered layout."""
    return _UnshardDTensor.apply(anchor, mark, layout)  # type: ignore[no-any-return, no-untyped-call]
