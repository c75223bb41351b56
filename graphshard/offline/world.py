"""A pretended world: so many ranks in one process, and a model whose tensors hold no data.

The process group is torch's "fake" one, which only knows how many ranks there are. A model is built
on the meta device and becomes fake CPU tensors: shapes, dtypes and placements, no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from graphshard import fsdp2
from graphshard.errors import OfflineError

Shapes = tuple[tuple[int, ...], ...]
Build = Callable[[], tuple[nn.Module, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Fake:
    """A sharded model and its inputs as fake tensors of `mode`, on rank 0."""

    mode: FakeTensorMode
    model: nn.Module
    inputs: tuple[Any, ...]

    @property
    def states(self) -> list[fsdp2.State]:
        return fsdp2.states_under(self.model)


@contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world_size`. Raises OfflineError (GS801)."""
    if dist.is_initialized():
        raise OfflineError(
            "GS801",
            "this process is part of a process group already, so it cannot pretend another one; "
            "plan in a process of its own",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def faked(build: Build) -> Fake:
    """What `build` returns, without data; call it inside `pretended`.

    Raises OfflineError: GS802 if parameters are not on the meta device, GS803 if no module was
    sharded. What FSDP2 raises for a model that it refuses comes through.
    """
    model, inputs = built(build)
    _check(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model.to_empty(device="cpu")
        inputs = tree_map_only(Tensor, _without_data, tuple(inputs))
        for state in fsdp2.states_under(model):
            fsdp2.lazy_init(state)
    return Fake(mode, model, inputs)


def built(build: Build) -> tuple[nn.Module, Sequence[Any]]:
    """What `build` returns, made on the meta device wherever it names no device."""
    with torch.device("meta"):
        return build()


def shapes(inputs: Sequence[Any]) -> Shapes:
    """Of all tensors in `inputs`, in order."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def _without_data(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _check(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A buffer that code computed elsewhere is small; parameters are what must not be there.
        if not tensor.is_meta and isinstance(tensor, nn.Parameter):
            raise OfflineError(
                "GS802",
                f"parameter {name} is on {tensor.device}, and planning allocates nothing: build "
                "the model on the meta device (with torch.device('meta'))",
            )
    if not fsdp2.states_under(model):
        raise OfflineError(
            "GS803",
            f"no module of {type(model).__name__} is sharded: call fully_shard on its blocks and "
            "on the model before it is returned",
        )
