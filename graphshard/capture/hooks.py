"""The traceable stand-ins for FSDP2's forward hooks.

Dynamo inlines these instead of the hooks. Entering a group replaces each of its registered
parameters by an `unshard` mark; leaving it puts back what was there, so that nothing is left for
Dynamo to do when the graph runs. The functions are written for Dynamo to read: plain loops,
few closures.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from graphshard.capture.boundary import through_boundary
from graphshard.capture.group_spec import CALLED, GroupSpec
from graphshard.capture.root_state import CaptureHandle
from graphshard.capture.subclasses import unshard_subclass
from graphshard.fsdp2.extensions import NONE
from graphshard.fsdp2.layouts import PLAIN
from graphshard.fsdp2.versions import LISTS_CAST_EACH
from graphshard.graph.marks import UNSHARD


def enter_group(
    module: nn.Module, spec: GroupSpec, begins: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """FSDP2's pre-forward: inputs to device, cast, accumulation boundary, parameters in.

    begins: a forward of the group begins, which may have several modules.
    """
    handle: CaptureHandle = module._graphshard_handle  # type: ignore[assignment]
    if spec.moves_inputs:
        args, kwargs = _mapped(_mover(spec.device), args, kwargs)
    if spec.input_dtype is not None and (begins or LISTS_CAST_EACH):
        args, kwargs = _mapped(_caster(spec.input_dtype), args, kwargs)
    if begins and spec.params and torch.is_grad_enabled():
        args, kwargs = through_boundary(args, kwargs)
    replaced: list[Any] = []
    if not handle.entered["top"]:
        if torch.is_grad_enabled():
            full = _gathered(handle, spec)
        else:
            # A parameter requires grad here too, and matmul chooses its ops by that.
            with torch.enable_grad():
                full = _gathered(handle, spec)
        for place in spec.places:
            holder = module if place.home == CALLED else handle.homes[place.home]
            for key in place.path:
                holder = holder._modules[key]  # type: ignore[assignment]
            registered: dict[str, Any] = holder._parameters
            for name, index in place.slots:
                # What is put back is what was there: Dynamo need not look at it, nor write it.
                replaced.append((registered, name, registered[name]))
                registered[name] = full[index]
    handle.entered["top"] = (spec, replaced, handle.entered["top"])
    return args, kwargs


def _gathered(handle: CaptureHandle, spec: GroupSpec) -> list[Tensor]:
    full: list[Tensor] = []
    for param in spec.params:
        trained, frozen = handle.anchors[param.group]
        anchor = trained if param.trainable else frozen
        mark = (param.size, param.dtype, spec.device, param.index)
        if param.layout == PLAIN and param.extension == NONE:
            full.append(UNSHARD(anchor, *mark))
        else:
            full.append(unshard_subclass(anchor, mark, param.extension, param.layout))
    return full


def leave_group(module: nn.Module, ends: bool, output: Any) -> Any:
    """FSDP2's post-forward: sharded parameters back in, output cast.

    ends: a forward of the group ends.
    """
    handle: CaptureHandle = module._graphshard_handle  # type: ignore[assignment]
    spec, replaced, handle.entered["top"] = handle.entered["top"]
    for registered, name, param in replaced:
        registered[name] = param
    if spec.output_dtype is not None and (ends or LISTS_CAST_EACH):
        output = _inside(_caster(spec.output_dtype), output)
    return output


def _mapped(
    change: Callable[[Tensor], Tensor], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`change`, applied to all tensors in the arguments of a call."""
    changed = []
    for value in args:
        changed.append(_inside(change, value))
    named = {}
    for name, value in kwargs.items():
        named[name] = _inside(change, value)
    return tuple(changed), named


def _inside(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """What FSDP2's `_apply_to_tensors` makes of `value`: containers are copied, some are not.

    That asks each number whether it is a dataclass, where Dynamo breaks the graph if the number
    is a symbol (a length, say, that was another one in an earlier call).
    """
    if isinstance(value, Tensor):
        return change(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__dataclass_fields__"):
        changes = {}
        for field in dataclasses.fields(value):
            changes[field.name] = _inside(change, getattr(value, field.name))
        return dataclasses.replace(value, **changes)
    if isinstance(value, OrderedDict):
        ordered = value.__class__()
        for name, item in value.items():
            ordered[name] = _inside(change, item)
        return ordered
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, dict):
        return {name: _inside(change, item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        items = [_inside(change, item) for item in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    return value


def _caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def cast(tensor: Tensor) -> Tensor:
        if torch.is_floating_point(tensor) and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return cast


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return move
