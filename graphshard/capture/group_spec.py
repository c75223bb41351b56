"""What entering a `fully_shard` group means to the traced code, as plain constants.

In: FSDP2's view of one group. Out: an `GroupSpec`, which Dynamo takes as a constant, and the links
that it relies on. True afterwards: groups of equal specs are traced alike, so that "the
spec is the one that was traced" is all that has to be guarded, once per group; identical
blocks have the same spec, and so has a group whose flags were flipped and flipped back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphshard import fsdp2
from graphshard.fsdp2 import FsdpGroup, FsdpParam, Slot, State
from graphshard.fsdp2.extensions import extension_number
from graphshard.fsdp2.layouts import layout_number
from graphshard.fsdp2.ranks import Ranks, ranks_of

CALLED = -1  # the home of what is below the module that is being called


@dataclass(frozen=True, slots=True)
class GatheredParam:
    """One gathered parameter, as its `unshard` mark says it.

    group, index: the place of its group among those of the `fully_shard` call, and its own there.
    size, dtype: with all-gather extensions those of the memory that holds it. layout: of a DTensor.
    extension: what they make of that memory (`graphshard.fsdp2.extensions`).
    """

    group: int
    index: int
    size: tuple[int, ...]
    dtype: torch.dtype
    layout: int
    extension: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class ParamHolder:
    """A module that holds parameters of the groups, by its way from a home.

    home: `CALLED`, or an index into `Layout.homes`. slots: name of each parameter, and its place
    in `GroupSpec.params`.
    """

    home: int
    path: tuple[str, ...]
    slots: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GroupSpec:
    """Pre- and post-forward of a `fully_shard` call's groups, which are one unless its parameters
    are on several meshes: casts, devices, and which parameters go where.

    meshes: the ranks that each group is sharded and replicated over. Tracing does not ask for them,
    but a plan is made for them, and ranks change plans together: only models on the same ranks may
    share a graph. has_all_reduce_hook: nor does tracing ask for this, but with a hook a plan may
    neither reduce a group in parts nor out of turn.
    """

    device: torch.device
    moves_inputs: bool
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    params: tuple[GatheredParam, ...]
    places: tuple[ParamHolder, ...]
    meshes: tuple[Ranks, ...] = ()
    has_all_reduce_hook: bool = False


@dataclass(frozen=True, slots=True)
class PathStep:
    """`modules[key]` is `module`: one step on the way to a place."""

    modules: dict[str, Any]
    key: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a group's parameters are registered now.

    homes: modules from which places are reached, unless it is the one that is called. links: what
    has to hold for the places to be right.
    """

    places: tuple[ParamHolder, ...]
    homes: tuple[nn.Module, ...]
    links: tuple[PathStep, ...]


# Weak: a spec lives as long as a group that has it or a graph that is guarded by it.
_SPECS: weakref.WeakKeyDictionary[GroupSpec, weakref.ref[GroupSpec]] = weakref.WeakKeyDictionary()


def interned(spec: GroupSpec) -> GroupSpec:
    """The one object that stands for all specs equal to this one, so that `is` compares."""
    known = _SPECS.setdefault(spec, weakref.ref(spec))()
    return spec if known is None else known


def spec_of(
    state: State, groups: Sequence[FsdpGroup], places: tuple[ParamHolder, ...]
) -> GroupSpec:
    """What entering the groups of `state` means now. Without parameters there is none, and casts
    only."""
    policy, device = fsdp2.cast_policy(state), fsdp2.device_of(state)
    full = tuple(
        _gathered(param, number, index)
        for number, group in enumerate(groups)
        for index, param in enumerate(group.params)
    )
    moves_inputs = fsdp2.is_root(state) and device.type != "cpu"
    meshes = tuple(map(ranks_of, groups))
    casts = policy.input_dtype, policy.output_dtype
    hooked = any(group.has_all_reduce_hook for group in groups)
    return interned(GroupSpec(device, moves_inputs, *casts, full, places, meshes, hooked))


def _gathered(param: FsdpParam, group: int, index: int) -> GatheredParam:
    size = param.size if param.extension is None else (param.extension.held_bytes,)
    layout, extension = layout_number(param.unsharded_spec), extension_number(param.extension)
    trainable = param.sharded.requires_grad
    return GatheredParam(group, index, size, param.wire_dtype, layout, extension, trainable)


def lay_out(roots: Sequence[nn.Module], groups: Sequence[FsdpGroup]) -> Registration:
    """Ways from `roots`, the modules of one `fully_shard` call, to the parameters of its groups.

    They are the ways that the model's own code takes, so that Dynamo sees each module under one
    name. A module that is no longer in the tree is its own home.
    """
    ways = _ways(roots)
    homes = list(roots) if len(roots) > 1 else []
    places: list[ParamHolder] = []
    links: list[PathStep] = []
    for module, slots in _by_module(groups).items():
        home, path = ways.get(module, (len(homes), ()))
        if module not in ways:
            homes.append(module)
        elif len(roots) == 1:
            home = CALLED
        links += _links(roots[0] if home == CALLED else homes[home], path)
        places.append(ParamHolder(home, path, slots))
    return Registration(tuple(places), tuple(homes), tuple(_each_once(links)))


def _ways(roots: Sequence[nn.Module]) -> dict[nn.Module, tuple[int, tuple[str, ...]]]:
    ways: dict[nn.Module, tuple[int, tuple[str, ...]]] = {}
    for home, root in enumerate(roots):
        for name, module in root.named_modules():
            ways.setdefault(module, (home, tuple(name.split(".")) if name else ()))
    return ways


def _by_module(groups: Sequence[FsdpGroup]) -> dict[nn.Module, tuple[tuple[str, int], ...]]:
    found: dict[nn.Module, tuple[tuple[str, int], ...]] = {}
    params = [param for group in groups for param in group.params]
    slots: Iterable[tuple[int, Slot]] = ((i, s) for i, p in enumerate(params) for s in p.slots)
    for index, slot in slots:
        found[slot.module] = (*found.get(slot.module, ()), (slot.name, index))
    return found


def _links(home: nn.Module, path: Iterable[str]) -> Iterator[PathStep]:
    module = home
    for key in path:
        below = module._modules[key]
        assert below is not None
        yield PathStep(module._modules, key, below)
        module = below


def _each_once(links: Sequence[PathStep]) -> Iterable[PathStep]:
    return {(id(link.modules), link.key): link for link in links}.values()
