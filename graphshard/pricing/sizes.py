"""Sizes of fake tensors as numbers or sympy expressions, and names of dtypes. Leaves no guards."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphshard.cost.algebra import Quantity

# Stands for a size that data decides, and that nothing bounds.
NO_HINT = 1
_BOUNDLESS = sys.maxsize // 2  # torch bounds by about `sys.maxsize` what it knows nothing of


class Sizes:
    """How to read sizes: by their hints, or as expressions of the given symbols.

    symbols: sympy expressions by the name of torch's own symbol; a size with another symbol in it
    counts with its hint. A size that data decides (how many elements are not zero, say) has none,
    and counts as the most that it can be.
    """

    __slots__ = ("_symbols",)

    def __init__(self, symbols: Mapping[str, Any] | None = None) -> None:
        self._symbols = symbols

    def quantity(self, size: Any) -> Quantity:
        if not isinstance(size, torch.SymInt):
            return size
        if self._symbols is not None:
            expr = size.node.expr
            found = {s: self._symbols[s.name] for s in expr.free_symbols if s.name in self._symbols}
            if len(found) == len(expr.free_symbols):
                return expr.xreplace(found)
        hint = size.node.hint if size.node.has_hint() else None
        return _most(size) if hint is None else int(hint)

    def shape(self, value: Any) -> Any:
        """A tensor's sizes; anything else as it is, symbols read."""
        if isinstance(value, Tensor):
            return tuple(self.quantity(n) for n in value.shape)
        if isinstance(value, list | tuple):
            return type(value)(self.shape(v) for v in value)
        return self.quantity(value)

    def bytes(self, value: Tensor) -> Quantity:
        """Bytes of distinct elements: an expanded dimension is stored once."""
        count = 1
        strided = value.layout == torch.strided
        for dim, size in enumerate(value.shape):
            if not (strided and isinstance(s := value.stride(dim), int) and s == 0):
                count = count * self.quantity(size)
        return count * value.itemsize


HINTS = Sizes()


def _most(size: torch.SymInt) -> int:
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(most) if most < _BOUNDLESS else NO_HINT


def dtype_name(dtype: torch.dtype, device: torch.device) -> str:
    """Torch's name of the dtype that arithmetic runs in: "tf32" where torch may use it."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
