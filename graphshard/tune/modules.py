"""Which modules of a model could be groups.

In: a model that is not sharded, and what sharded it before. Out: for each grouping the
`fully_shard` calls that make it, as names of modules, children first; and the finest of all, of
which each other one is a union.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from graphshard.fsdp2.undo import Sharding
from graphshard.schedule.setting import NEIGHBOURS, Grouping

# The names of the modules of one `fully_shard` call.
Modules = tuple[str, ...]
Calls = tuple[Modules, ...]
# Outside of blocks, what has at least so much of a block's parameters may be a group of its own.
LARGE = 0.5


@dataclass(frozen=True, slots=True)
class Groupings:
    """calls: of each grouping, AS_IS missing where the model was not sharded. finest: see above.
    blocks: names, by list. params: names of all parameters, in the model's order. root: the module
    that all calls are in."""

    calls: Mapping[Grouping, Calls]
    finest: Calls
    blocks: tuple[tuple[str, ...], ...]
    params: tuple[str, ...]
    root: str = ""


def root_of(sharding: Sharding) -> str | None:
    """The one module that holds all sharded ones; None if several do, "" without any."""
    calls = [call.modules for call in sharding.calls]
    outer = [
        modules for modules in calls
        if not any(is_inside(modules[0], o) for other in calls if other != modules for o in other)
    ]  # fmt: skip
    if not outer:
        return ""
    return outer[0][0] if len(outer) == 1 and len(outer[0]) == 1 else None


def groupings_of(
    model: nn.Module, sharding: Sharding, root: str, *, may_be_apart: bool = True
) -> Groupings:
    """model: not sharded; sharding: what it had been. may_be_apart: large modules outside of blocks
    may be groups of their own."""
    closed = set(_closed(model))
    lists = tuple(_block_lists(model, root, closed))
    blocks = [name for names in lists for name in names]
    own = tuple(call.modules for call in sharding.calls)
    top: Calls = ((root,),)
    found: dict[Grouping, Calls] = {Grouping.AS_IS: own} if own else {}
    if blocks:
        found[Grouping.BLOCKS] = (*((name,) for name in blocks), *top)
        apart = list(_apart(model, root, blocks, own, closed))
        if apart and may_be_apart:
            found[Grouping.APART] = (*((name,) for name in blocks), *apart, *top)
        for kind, count in NEIGHBOURS.items():
            runs = [names[at : at + count] for names in lists for at in range(0, len(names), count)]
            if len(runs) < len(blocks):
                found[kind] = (*runs, *top)
    found[Grouping.WHOLE] = top
    finest = _finest(own, found, closed, top)
    params = tuple(name for name, _ in model.named_parameters())
    return Groupings(_distinct(found, finest), finest, lists, params, root)


def is_inside(name: str, module: str) -> bool:
    """`name` is `module` or in it."""
    return not module or name == module or name.startswith(f"{module}.")


def owner_of(name: str, calls: Calls) -> Modules | None:
    """The call that takes a module or parameter: that of the nearest module around it."""
    around = [
        (len(module) if module else -1, modules)
        for modules in calls
        for module in modules
        if is_inside(name, module)
    ]
    return max(around, key=lambda one: one[0])[1] if around else None


def _closed(model: nn.Module) -> Iterator[str]:
    """Modules that share no parameter with what is outside of them."""
    places: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(param), []).append(name)
    shared = [names for names in places.values() if len(names) > 1]
    for name, module in model.named_modules():
        own = {id(param) for param in module.parameters()}
        if own and all(
            all(is_inside(place, name) for place in names)
            for names in shared
            if any(is_inside(place, name) for place in names)
        ):
            yield name


def _block_lists(model: nn.Module, root: str, closed: set[str]) -> Iterator[tuple[str, ...]]:
    """The outermost lists of modules of one class."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        if not is_inside(name, root) or any(is_inside(name, other) for other in found):
            continue
        children = dict(module.named_children())
        names = tuple(f"{name}.{key}" if name else key for key in children)
        alike = len({type(child) for child in children.values()}) == 1
        if len(names) > 1 and alike and all(child in closed for child in names):
            found.append(name)
            yield names


def _apart(
    model: nn.Module, root: str, blocks: Sequence[str], own: Calls, closed: set[str]
) -> Iterator[Modules]:
    """Large modules outside of blocks that hold parameters themselves; and what shares parameters,
    as the model's own call has it together."""

    def is_outside(name: str) -> bool:
        return is_inside(name, root) and not any(is_inside(name, block) for block in blocks)

    large = LARGE * min(_numel(model.get_submodule(name)) for name in blocks)
    for name, module in model.named_modules():
        is_own = bool(module._parameters) and name != root and is_outside(name)
        if is_own and name in closed and _numel(module) >= large:
            yield (name,)
    for modules in own:
        if len(modules) > 1 and not closed.issuperset(modules) and all(map(is_outside, modules)):
            yield modules


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _finest(own: Calls, found: Mapping[Grouping, Calls], closed: set[str], top: Calls) -> Calls:
    """Every module of any call alone; together only where they share parameters."""
    parts: dict[Modules, None] = {}
    for modules in (m for calls in (own, *found.values()) for m in calls if m not in top):
        split = [(module,) for module in modules] if closed.issuperset(modules) else [modules]
        parts |= dict.fromkeys(split)
    deep = sorted(parts, key=lambda modules: -max(name.count(".") for name in modules))
    return (*deep, *top)


def _distinct(found: Mapping[Grouping, Calls], finest: Calls) -> dict[Grouping, Calls]:
    """Without groupings that are others over again."""
    known: dict[frozenset[frozenset[Modules]], Grouping] = {}
    for kind, calls in found.items():
        parts: dict[Modules | None, set[Modules]] = {}
        for modules in finest:
            parts.setdefault(owner_of(modules[0], calls), set()).add(modules)
        known.setdefault(frozenset(map(frozenset, parts.values())), kind)
    return {kind: found[kind] for kind in known.values()}
