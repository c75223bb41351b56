"""A live view of one FSDP2 parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a module where a parameter is registered."""

    module: nn.Module
    name: str


class FsdpParam:
    """A live view of one FSDPParam."""

    __slots__ = ("raw", "slots")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        info = raw._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.slots = (Slot(info.module, info.param_name), *(Slot(m, n) for m, n in shared))

    @property
    def fqn(self) -> str:
        return str(self.raw._param_fqn or self.raw._module_info.param_name)

    @property
    def size(self) -> tuple[int, ...]:
        """Unsharded size."""
        return tuple(self.raw._orig_size)

    @property
    def padded_shard_size(self) -> tuple[int, ...]:
        """This rank's shard with FSDP2's padding; the same on every rank."""
        return tuple(self.raw.padded_sharded_param_size)

    @property
    def shard_dim(self) -> int:
        return int(self.raw.fsdp_placement.dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that compute sees: the policy's `param_dtype`, else the parameter's own."""
        return self.raw.param_dtype or self.raw.orig_dtype  # type: ignore[no-any-return]

    @property
    def shard(self) -> Tensor:
        """This rank's padded data, one-dimensional, in the parameter's own dtype, no gradient."""
        return self.raw._sharded_param_data  # type: ignore[no-any-return]

    @property
    def sharded(self) -> nn.Parameter:
        """The DTensor parameter that the optimizer sees."""
        return self.raw.sharded_param  # type: ignore[no-any-return]

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes when the shard is written to (by an optimizer, say) or replaced.

        An operation on the DTensor counts on the DTensor, one on its local tensor only there.
        """
        param = self.raw.sharded_param
        local = param._local_tensor
        if local.is_inference():
            return local.data_ptr(), 0, 0
        return local.data_ptr(), param._version, local._version

    def add_sharded_grad(self, local: Tensor) -> None:
        """Set or add to `.grad` and run the post-accumulate-grad hooks, as FSDP2 does.

        local: this rank's part of the reduced gradient, of the sharded size.
        """
        param = self.raw.sharded_param
        if param.grad is None:
            param.grad = self.raw.to_sharded_dtensor(local)
        else:
            param.grad._local_tensor += local
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(param)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient on the wire."""
        return self.raw.reduce_dtype or self.dtype

    @property
    def reduce_item_bytes(self) -> int:
        """Bytes of one element of the gradient on the wire."""
        return self.reduce_dtype.itemsize

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded `.grad`; None leaves it in the reduction's dtype."""
        dtype = getattr(self.raw, "sharded_grad_dtype", self.raw.orig_dtype)  # torch >= 2.15
        return dtype  # type: ignore[no-any-return]

    def as_accumulated(self, grad: Tensor) -> Tensor:
        """`grad` in the dtype in which FSDP2 accumulates it over micro-steps without sync."""
        if hasattr(self.raw, "unsharded_grad_dtype"):  # torch >= 2.15
            dtype = self.raw.unsharded_grad_dtype
        else:
            dtype = self.raw.reduce_dtype
        return grad if dtype is None else grad.to(dtype)

    def as_autograd_gives(self, grad: Tensor) -> Tensor:
        """`grad` as a leaf of this torch would receive it.

        2.15 narrows it at once, and widens at once what tensor parallel may have to reduce.
        """
        dtype = getattr(self.raw, "unsharded_grad_dtype", None)
        if dtype is None:
            return grad
        narrow = dtype.itemsize < grad.dtype.itemsize
        return grad.to(dtype) if narrow or self.raw.may_reduce_grad_outside_dp else grad

    @property
    def unsharded_spec(self) -> Any:
        """Mesh, placements and global shape of an unsharded DTensor; None for a plain tensor."""
        if hasattr(self.raw, "_unsharded_dtensor_spec"):  # torch >= 2.13
            return self.raw._unsharded_dtensor_spec
        return self.raw._tp_spec if self.raw.is_dtensor else None

    def local_gradient(self, grad: Tensor) -> Tensor:
        """What FSDP2 reduces: for a DTensor its local part, after it is reduced on the rest of
        the mesh."""
        return self.raw._get_grad_inner_tensor(grad)  # type: ignore[no-any-return]

    @property
    def local_size(self) -> tuple[int, ...]:
        """Size of this rank's part without padding."""
        return tuple(self.raw.sharded_size)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return tuple(self.raw.contiguous_sharded_stride)
