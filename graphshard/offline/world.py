"""A pretended world: so many ranks in one process, and a model whose tensors hold no data.

The process group is torch's "fake" one, which only knows how many ranks there are. A model is built
on the meta device and becomes fake CPU tensors: shapes, dtypes and placements, no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from graphshard import fsdp2
from graphshard.errors import OfflineError
from graphshard.fsdp2 import FsdpGroup
from graphshard.fsdp2.describe import describe, name_of
from graphshard.fsdp2.settings import GroupSettings, settings_of
from graphshard.offline.unfilled import Unfilled
from graphshard.schedule.plan import GroupInfo


@dataclass(frozen=True, slots=True)
class InputDim:
    """Dimension `dim` of the input tensor number `leaf`."""

    leaf: int
    dim: int


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A sharded model and the arguments of one call."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Build = Callable[[], Made]


@dataclass(frozen=True, slots=True)
class Fake:
    """A sharded model and the arguments of one call as fake tensors of `mode`, on rank 0."""

    mode: FakeTensorMode
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors((self.args, self.kwargs))

    @property
    def states(self) -> list[fsdp2.State]:
        return fsdp2.states_under(self.model)


@contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world_size`. Raises OfflineError (GS901)."""
    if dist.is_initialized():
        raise OfflineError(
            "GS901",
            "this process is part of a process group already, so it cannot pretend another one; "
            "plan in a process of its own",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # It would yield DTensors on an equal mesh, whose process groups are gone.
        _clear_sharding_prop_cache()


def faked(build: Build) -> Fake:
    """What `build` returns, without data; call it inside `pretended`.

    Raises OfflineError: GS902 if parameters are not on the meta device, GS903 if no module was
    sharded. What FSDP2 raises for a model that it refuses comes through.
    """
    made = built(build)
    _check(made.model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made.model.to_empty(device="cpu")
        args, kwargs = tree_map_only(Tensor, _without_data, (made.args, made.kwargs))
        for state in fsdp2.states_under(made.model):
            fsdp2.lazy_init(state)
    return Fake(mode, made.model, args, kwargs)


def called_with(fake: Fake, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fake:
    """The same model with other arguments."""
    with fake.mode:
        args, kwargs = tree_map_only(Tensor, _without_data, (args, kwargs))
    return replace(fake, args=args, kwargs=kwargs)


def built(build: Build) -> Made:
    """What `build` returns, made on the meta device wherever it names no device."""
    with torch.device("meta"), Unfilled():
        return build()


def shapes(made: Made | Fake) -> Shapes:
    """Of all tensors among the arguments, in order."""
    return tuple(tuple(leaf.shape) for leaf in _tensors((made.args, made.kwargs)))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _without_data(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _check(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # A buffer that code computed elsewhere is small; parameters are what must not be there.
        if not tensor.is_meta and isinstance(tensor, nn.Parameter):
            raise OfflineError(
                "GS902",
                f"parameter {name} is on {tensor.device}, and planning allocates nothing: build "
                "the model on the meta device (with torch.device('meta'))",
            )
    if not fsdp2.states_under(model):
        raise OfflineError(
            "GS903",
            f"no module of {type(model).__name__} is sharded: call fully_shard on its blocks and "
            "on the model before it is returned",
        )


@dataclass(frozen=True, slots=True)
class World:
    """The groups of a program as they are sharded over so many ranks."""

    infos: tuple[GroupInfo, ...]
    settings: tuple[GroupSettings, ...]


def groups_of(fake: Fake) -> list[FsdpGroup]:
    """All groups, with what their all-gather extensions send."""
    groups = [group for state in fake.states for group in fsdp2.fsdp_groups(state)]
    for group in groups:
        group.read_extensions()
    return groups


def world_of(fake: Fake, names: Sequence[str], ranks_per_node: int) -> World:
    """names: the program's groups, in its order. Raises OfflineError (GS904) for other groups."""
    groups = {name_of(group): group for group in groups_of(fake)}
    missing = [name for name in names if name not in groups]
    if missing:
        raise OfflineError("GS904", f"{missing[0]} is no group on every number of ranks")
    own = [groups[name] for name in names]
    infos = tuple(describe(place, group) for place, group in enumerate(own))
    settings = settings_of(own, ranks_per_node)
    # The pretended backend sends nothing at all: the machine's counts.
    return World(infos, tuple(replace(one, in_place=None, clones=None) for one in settings))


def varying(every: Sequence[Shapes]) -> tuple[InputDim, ...]:
    """Dimensions of input tensors that differ. Raises OfflineError (GS905) for other ranks."""
    kinds = {tuple(map(len, own)) for own in every}
    if len(kinds) > 1:
        raise OfflineError("GS905", "the inputs have other numbers of dimensions at other sizes")
    return tuple(
        InputDim(leaf, dim)
        for leaf, column in enumerate(zip(*every, strict=True))
        for dim, found in enumerate(zip(*column, strict=True))
        if len(set(found)) > 1
    )
