"""Refuses tensors that hold data in proportion to a model, before they are allocated.

Seen is what torch makes; what numpy or another library fills is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphshard.errors import OfflineError

# Index tensors and tables are far smaller, models that are worth planning larger.
MOST_BYTES = 2**30


class Unfilled(TorchDispatchMode):
    """Inside, what ops make off the meta device may take MOST_BYTES in all. Raises GS902."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made_bytes = 0
        self._known: dict[Any, int] = {}  # blocks that are alike do the same

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _device_of(args, kwargs)
        if device is not None and device.type != "meta":
            key = func, _described((args, kwargs))
            if key not in self._known:
                self._known[key] = _new_bytes(func, args, kwargs)
            self._made_bytes += self._known[key]
            if self._made_bytes > MOST_BYTES:
                raise OfflineError(
                    "GS902",
                    f"{func} would bring what holds data on {device} to {self._made_bytes:,} bytes,"
                    " and planning allocates nothing: leave tensors on the meta device",
                )
        return func(*args, **kwargs)


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Where the results of an op are; None if no tensor is made."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [*_tensors(args), *_tensors(kwargs)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    return next((x.device for x in tensors if x.device.type != "meta"), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    """What `tree_leaves` finds, for a third of the time: each op of a whole model comes here."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _tensors(own)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _described(value: Any) -> Any:
    """All of an argument that the size of a result may depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return tuple((key, _described(own)) for key, own in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), str(value)


def _new_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """What the results take that is not an argument's memory; 0 where that hangs on data."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = func(*args, **kwargs)
    except Exception:  # an op that fails does so again when it is run
        return 0
    if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
        return 0  # in place, or a view
    return sum(x.numel() * x.element_size() for x in tree_leaves(found) if isinstance(x, Tensor))
