"""Ways to write to a model's shards, most of which no version counts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def counted(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


def through_data(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        param.data.mul_(factor)


def through_local_data(model: nn.Module, factor: float) -> None:
    for local in locals_of(model):
        local.data.mul_(factor)


def through_foreach(model: nn.Module, factor: float) -> None:
    torch._foreach_mul_([local.data for local in locals_of(model)], factor)


def through_numpy(model: nn.Module, factor: float) -> None:
    for local in locals_of(model):
        array = local.detach().numpy()
        array *= factor


WRITES: dict[str, Callable[[nn.Module, float], None]] = {
    f.__name__: f
    for f in (counted, through_data, through_local_data, through_foreach, through_numpy)
}
