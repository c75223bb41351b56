"""The autograd node through which FSDP2 passes what a group's forward is given.

All inputs that require grad go through one node where the forward begins. That decides in which
order gradients add up at fan-outs, and with it the last bit; a tensor given twice comes out as two;
and as soon as one input gets a gradient, those that nothing uses get zeros.

The functions are written for Dynamo to read: plain loops, no closures.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.fsdp2.versions import INPUTS_ARE_WALKED


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _boundary(*tensors: Tensor) -> tuple[Tensor, ...]:
    passed: tuple[Tensor, ...] = _Boundary.apply(*tensors)  # type: ignore[no-untyped-call]
    return passed


def through_boundary(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with each tensor that requires grad behind the node."""
    tensors: list[Tensor] = []
    _collect(args, tensors)
    _collect(kwargs, tensors)
    if not tensors:
        return args, kwargs
    passed = _passed(tensors)
    passed.reverse()
    return _replaced(args, passed), _replaced(kwargs, passed)


def _passed(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if _has_own_function(tensor):
            # The node would lose the class. Gradients of views add up in the same order, if these
            # are made the other way round; one that nothing uses gives no zeros.
            views = [tensor.view_as(tensor) for tensor in reversed(tensors)]
            views.reverse()
            return views
    return list(_boundary(*tensors))


def _has_own_function(tensor: Tensor) -> bool:
    """A subclass that lives in Python alone: an image that knows its metadata, say."""
    is_torchs = type(tensor) is Tensor or isinstance(tensor, nn.Parameter)
    return not is_torchs and not hasattr(tensor, "__tensor_flatten__")


def _collect(value: Any, tensors: list[Tensor]) -> None:
    """Add to `tensors` those that require grad, in FSDP2's order."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            tensors.append(value)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), tensors)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, tensors)


def _replaced(value: Any, passed: list[Tensor]) -> Any:
    """`value` with what was collected of it replaced by the last of `passed`, which shrinks. A
    container without any stays the same object: what a forward writes to it is seen outside."""
    if isinstance(value, Tensor):
        return passed.pop() if value.requires_grad else value
    before = len(passed)
    if _is_dataclass(value):
        changes = {}
        for field in dataclasses.fields(value):
            left = len(passed)
            changed = _replaced(getattr(value, field.name), passed)
            if len(passed) < left:
                changes[field.name] = changed
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        named = {}
        for name, item in value.items():
            named[name] = _replaced(item, passed)
        if len(passed) == before and INPUTS_ARE_WALKED:
            return value
        return named if type(value) is dict else type(value)(named)
    if isinstance(value, (list, tuple)):
        items = []
        for item in value:
            items.append(_replaced(item, passed))
        if len(passed) == before and INPUTS_ARE_WALKED:
            return value
        return type(value)(*items) if _is_named(value) else type(value)(items)
    return value


def _is_dataclass(value: Any) -> bool:
    # Asked whether it is one, a number that is a symbol breaks the graph; before 2.12 dicts do.
    if value is None or isinstance(value, (bool, int, float, str)) or _is_named(value):
        return False
    if type(value) in (list, tuple, dict, OrderedDict):
        return False
    is_one = hasattr(value, "__dataclass_fields__") and not isinstance(value, type)
    # pytree, which FSDP2 asked in former times, knows those that are dicts as well.
    return is_one and (INPUTS_ARE_WALKED or isinstance(value, dict))


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
