"""A view of one FSDP2 parameter: sizes as they were sharded, everything else as it is now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.fsdp2 import versions
from graphshard.fsdp2.extensions import Extension, take_over


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a module where a parameter is registered."""

    module: nn.Module
    name: str


class FsdpParam:
    """A view of one FSDPParam.

    Sizes are read once, since sharding fixes them; the rest is read when it is asked for.
    extension: what its all-gather extensions do, once that is read (`FsdpGroup.read_extensions`).
    spare_leaf: the unsharded parameter that FSDP2 made then, until it needs one.
    size: unsharded. shard_dim: the dimension that is cut. padded_shard_size: this rank's shard with
    FSDP2's padding, the same on every rank; padded_numel: its elements. local_size, local_stride:
    this rank's part without padding.
    """

    __slots__ = (
        "extension",
        "local_size",
        "local_stride",
        "padded_numel",
        "padded_shard_size",
        "raw",
        "shard_dim",
        "size",
        "slots",
        "spare_leaf",
    )

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.extension: Extension | None = None
        self.spare_leaf: Any = None
        info = raw._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.slots = (Slot(info.module, info.param_name), *(Slot(m, n) for m, n in shared))
        self.size: tuple[int, ...] = tuple(raw._orig_size)
        self.shard_dim = int(raw.fsdp_placement.dim)
        self.padded_shard_size: tuple[int, ...] = tuple(raw.padded_sharded_param_size)
        self.padded_numel = math.prod(self.padded_shard_size)
        self.local_size: tuple[int, ...] = tuple(raw.sharded_size)
        self.local_stride: tuple[int, ...] = tuple(raw.contiguous_sharded_stride)

    def by_rank(self, whole: Tensor, ranks: int) -> Tensor:
        """`whole`, of its unsharded size, with the part of one rank after that of the other."""
        return torch.cat(whole.chunk(ranks, dim=self.shard_dim))

    def gathered(self, ranks: int) -> Tensor:
        """What FSDP2 has gathered, one-dimensional, the shard of one rank after that of the other.
        With extensions, as bytes."""
        if self.extension is not None:
            memory = torch.empty(
                self.extension.held_bytes, dtype=torch.uint8, device=self.raw.device
            )
            take_over(self.raw, self.extension, memory)
            return memory
        flat: Tensor = self.raw.all_gather_outputs[0]
        if self.shard_dim == 0:
            return flat
        return self.by_rank(flat.view(self.size), ranks).flatten()

    @property
    def fqn(self) -> str:
        return str(self.raw._param_fqn or self.raw._module_info.param_name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that compute sees: the policy's `param_dtype`, else the parameter's own."""
        return self.raw.param_dtype or self.raw.orig_dtype  # type: ignore[no-any-return]

    @property
    def wire_dtype(self) -> torch.dtype:
        """What travels, and what a graph has of it: bytes, of whatever extensions make of it."""
        return self.dtype if self.extension is None else torch.uint8

    @property
    def sent_numel(self) -> int:
        """Elements of `wire_dtype` that each rank sends."""
        return self.padded_numel if self.extension is None else self.extension.sent_bytes

    @property
    def sharded(self) -> nn.Parameter:
        """The DTensor parameter that the optimizer sees."""
        return self.raw.sharded_param  # type: ignore[no-any-return]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient on the wire."""
        return self.raw.reduce_dtype or self.dtype

    @property
    def reduce_item_bytes(self) -> int:
        """Bytes of one element of the gradient on the wire."""
        return self.reduce_dtype.itemsize

    def as_accumulated(self, grad: Tensor) -> Tensor:
        """`grad` in the dtype in which FSDP2 accumulates it over micro-steps without sync."""
        if versions.GRADS_HAVE_DTYPES:
            dtype = self.raw.unsharded_grad_dtype
        else:
            dtype = self.raw.reduce_dtype
        return grad if dtype is None else grad.to(dtype)

    def as_autograd_gives(self, grad: Tensor) -> Tensor:
        """`grad` as a leaf of torch >= 2.15 would receive it.

        It narrows a gradient at once, and widens at once what tensor parallel may have to reduce.
        """
        dtype = self.raw.unsharded_grad_dtype
        if dtype is None:
            return grad
        narrow = dtype.itemsize < grad.dtype.itemsize
        return grad.to(dtype) if narrow or self.raw.may_reduce_grad_outside_dp else grad

    @property
    def unsharded_spec(self) -> Any:
        """Mesh, placements and global shape of an unsharded DTensor; None for a plain tensor."""
        if versions.UNSHARDED_SPEC_IS_KEPT:
            return self.raw._unsharded_dtensor_spec
        return self.raw._tp_spec if self.raw.is_dtensor else None

    def local_gradient(self, grad: Tensor) -> Tensor:
        """What FSDP2 reduces: for a DTensor its local part, after it is reduced on the rest of
        the mesh."""
        return self.raw._get_grad_inner_tensor(grad)  # type: ignore[no-any-return]


def grad_dtypes(params: Sequence[FsdpParam]) -> list[torch.dtype | None]:
    """Dtype of each sharded `.grad`; None leaves it in the reduction's dtype."""
    raws = [param.raw for param in params]
    if versions.GRADS_HAVE_DTYPES:
        return [raw.sharded_grad_dtype for raw in raws]
    return [raw.orig_dtype for raw in raws]


def add_sharded_grads(params: Sequence[FsdpParam], local: Sequence[Tensor]) -> None:
    """Set or add to each `.grad` and run the post-accumulate-grad hooks, as FSDP2 does.

    local: for each parameter this rank's part of the reduced gradient, of the sharded size.
    """
    for param, part in zip(params, local, strict=True):
        sharded = param.raw.sharded_param
        grad = sharded.grad
        if grad is None:
            # `DTensor(...)` would also run its `__init__`, which does nothing but is kept from
            # Dynamo at twice the cost of the rest.
            spec = param.raw._sharding_spec
            sharded.grad = DTensor.__new__(DTensor, part, spec, requires_grad=False)
        else:
            grad._local_tensor += part
        for hook in hooks_of(sharded):
            hook(sharded)


def hooks_of(sharded: Tensor) -> Sequence[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` was given for this parameter."""
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else ()
