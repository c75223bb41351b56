"""The traceable stand-ins for FSDP2's forward hooks.

Dynamo inlines these instead of the hooks. Entering a group replaces each of its registered
parameters by an `unshard` mark; leaving it puts the DTensors back. Dynamo tracks both and leaves
the module as it was. The functions are written for Dynamo to read: plain loops, no closures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from graphshard.capture.dtensors import unshard_dtensor
from graphshard.capture.ports import Port
from graphshard.fsdp2.layouts import PLAIN
from graphshard.ops import UNSHARD


def enter_group(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """FSDP2's pre-forward: inputs to device, cast, accumulation boundary, parameters in."""
    port: Port = module._graphshard_port  # type: ignore[assignment]
    if port.moves_inputs:
        args, kwargs = _to_device(port.device, args), _to_device(port.device, kwargs)
    if port.input_dtype is not None:
        args, kwargs = _cast(port.input_dtype, args), _cast(port.input_dtype, kwargs)
    if torch.is_grad_enabled():
        args, kwargs = _apply_to_tensors(_boundary, args), _apply_to_tensors(_boundary, kwargs)
    if not port.entered:
        for item in port.params:
            param = item.param.sharded
            anchor = port.anchor if param.requires_grad else port.frozen_anchor
            mark = (item.size, item.dtype, port.device, item.index)
            if item.layout == PLAIN:
                full = UNSHARD(anchor, *mark)
            else:
                full = unshard_dtensor(anchor, mark, item.layout)
            item.module._parameters[item.name] = full
            for slot in item.shared:
                slot.module._parameters[slot.name] = full
    port.entered.append(module)
    return args, kwargs


def leave_group(module: nn.Module, output: Any) -> Any:
    """FSDP2's post-forward: sharded parameters back in, output cast."""
    port: Port = module._graphshard_port  # type: ignore[assignment]
    port.entered.pop()
    if not port.entered:
        for item in port.params:
            param = item.param.sharded
            item.module._parameters[item.name] = param
            for slot in item.shared:
                slot.module._parameters[slot.name] = param
    if port.output_dtype is not None:
        output = _cast(port.output_dtype, output)
    return output


def _boundary(tensor: Tensor) -> Tensor:
    # FSDP2 passes a group's grad-requiring inputs through one autograd node, which decides how
    # gradients add up at fan-outs, and with it the last bit. A view has the same effect.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        if torch.is_floating_point(tensor) and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return _apply_to_tensors(cast, tree)


def _to_device(device: torch.device, tree: Any) -> Any:
    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return _apply_to_tensors(move, tree)
