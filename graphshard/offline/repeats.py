"""Finds blocks of a sharded model that are alike, so that a few of them stand for all.

Two modules are alike if their classes, attributes, parameters, buffers, hooks, FSDP2 policies and
children are. Whatever differs (a layer number, say) makes them different: what is not surely alike
is captured whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from graphshard import fsdp2
from graphshard.pricing.region_cuts import AT_START, AT_TURN

# Two show what repeats. Those before and behind them have neighbours of their own, and forward may
# be cut inside the first and the last few (`graphshard.pricing.region_cuts`).
EARLY, LATE = 1 + AT_START, 1 + AT_TURN
# As LATE, where nothing is cut inside because no part of a group may travel alone.
LATE_UNCUT = 2
CAPTURED = EARLY + LATE
_OWN = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` blocks in a row that are alike. names: their FQNs; `container` holds nothing else, or
    blocks that other repeats have.

    late: how many are captured from the second on of the two that show what repeats.
    """

    container: str
    names: tuple[str, ...]
    late: int = LATE

    @property
    def captured(self) -> int:
        """How many stand for all: at most all."""
        return min(self.count, EARLY + self.late)

    @property
    def count(self) -> int:
        return len(self.names)


def is_inside(group: str, block: str) -> bool:
    """The group of this FQN is the block's, on one mesh or on one of several, or of a module in
    it."""
    return group == block or group.startswith((f"{block}.", f"{block} ["))


def repeats_in(model: nn.Module, *, cut_inside: bool = True) -> list[Repeat]:
    """Lists of more sharded blocks than are captured, all alike. cut_inside: forward may be, since
    groups may travel in parts."""
    found, late = [], LATE if cut_inside else LATE_UNCUT
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        blocks = dict(container.named_children())
        sharded = all(isinstance(block, fsdp2.ShardedModule) for block in blocks.values())
        if (
            len(blocks) > EARLY + late
            and sharded
            and len(set(map(signature, blocks.values()))) == 1
        ):
            prefix = f"{name}." if name else ""
            found.append(Repeat(name, tuple(prefix + key for key in blocks), late))
    return found


def shorten(model: nn.Module, repeat: Repeat, count: int = 0) -> None:
    """Leave the first `count` blocks; 0: as many as are captured."""
    container = model.get_submodule(repeat.container)
    for name in repeat.names[count or repeat.captured :]:
        delattr(container, name.rpartition(".")[2])


@contextmanager
def shortened(model: nn.Module, repeats: Iterable[Repeat]) -> Iterator[None]:
    """Inside, each list has as many blocks as are captured."""
    whole = {repeat: dict(model.get_submodule(repeat.container)._modules) for repeat in repeats}
    try:
        for repeat in whole:
            shorten(model, repeat)
        yield
    finally:
        for repeat, blocks in whole.items():
            model.get_submodule(repeat.container)._modules.update(blocks)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that are alike."""
    own = sorted((k, _value(v)) for k, v in vars(module).items() if _is_own(k))
    hooks = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    policy: tuple[Any, ...] = ()
    if isinstance(module, fsdp2.ShardedModule):
        policy = (fsdp2.mixed_precision(fsdp2.state_of(module)),)
    return (
        type(module),
        module.training,
        tuple(own),
        tuple(tuple(_hook(hook, module) for hook in found.values()) for found in hooks),
        policy,
        tuple((k, *_tensor(p)) for k, p in module._parameters.items()),
        tuple((k, *_tensor(b)) for k, b in module._buffers.items()),
        tuple((k, None if m is None else signature(m)) for k, m in module._modules.items()),
    )


def plain_attributes(module: nn.Module) -> tuple[Any, ...]:
    """Numbers and text that the module's class keeps, directly or in lists."""
    own = ((k, _plain(v)) for k, v in vars(module).items() if _is_own(k))
    return tuple(sorted((k, value) for k, value in own if value is not None))


def _plain(value: Any) -> str | None:
    """None for what another object stands for in another model."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        inner = [_plain(one) for one in value]
        return None if None in inner else repr(inner)
    return None


def _is_own(name: str) -> bool:
    """An attribute of the module's class; not torch's, nor where `fully_shard` keeps its state."""
    return name not in _OWN and not name.startswith("__composable_api_state_key")


def _tensor(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    placed = getattr(tensor, "placements", None)
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, placed


def _value(value: Any) -> tuple[Any, ...]:
    """Plain values and torch's functions by what they are, everything else by which object it
    is."""
    if isinstance(value, (*_PLAIN, Placement)):
        return type(value).__name__, repr(value)
    if isinstance(value, FunctionType) and _is_torchs(value):
        return _function(value)
    if isinstance(value, ParallelStyle):
        return type(value).__name__, _value(vars(value))
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_value, value))
    if isinstance(value, dict):
        return "dict", tuple((_value(k), _value(v)) for k, v in value.items())
    if isinstance(value, functools.partial):
        return "partial", _value(value.func), _value(value.args), _value(value.keywords)
    return type(value).__name__, str(id(value))


def _function(function: FunctionType) -> tuple[Any, ...]:
    """By its code, its module and what it has from around it: torch's tensor parallel makes each
    module hooks of its own."""
    cells = tuple(_value(cell.cell_contents) for cell in function.__closure__ or ())
    defaults = _value(function.__defaults__), _value(function.__kwdefaults__)
    return "function", id(function.__code__), id(function.__globals__), cells, defaults


def _hook(hook: Any, module: nn.Module) -> tuple[Any, ...]:
    """torch's hooks (FSDP2's are bound to its states, of which `signature` knows what matters) and
    the module's own methods by their function, everything else by what it is."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    function = inner.__func__ if isinstance(inner, MethodType) else inner
    is_own = isinstance(hook, MethodType) and hook.__self__ is module
    if is_own and not _is_torchs(function):
        return "function", id(function)
    return _value(function) if _is_torchs(function) else _value(hook)


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")
