"""All-gather extensions: tensor subclasses that say what travels, and what is made of what arrives.

A parameter whose local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather` (float8, NF4,
int8, users' own) sends several tensors in dtypes of their own, and compute sees what the second of
them makes of all ranks' tensors: another subclass, or a plain tensor in another dtype.

While it is gathered, all of it stands in one memory of bytes: first what arrived, the largest in
front, then what was made anew; what is a view of the largest is there already. So a graph has one
plain tensor for it, of which `rebuild` makes the unsharded parameter again. An `Extension` is the
plan of that memory.

Assumed: the plan, read once before the first gather, holds for every later one. `send` and `fill`
compare each time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphshard.errors import RuntimeStateError

NONE = -1  # the number of a parameter without extensions
ALIGNMENT_BYTES = 64  # of torch's own CPU memory: kernels load vectors


@dataclass(frozen=True, slots=True)
class Place:
    """One plain tensor in the memory of a gathered parameter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of `memory`."""
        end = self.offset_bytes + self.extent * self.dtype.itemsize
        part = memory[self.offset_bytes : end].view(self.dtype)
        if self.stride == make_contiguous_strides_for(self.size):
            return part.view(self.size)
        return part.as_strided(self.size, self.stride)

    @property
    def extent(self) -> int:
        """Elements from the first to the last."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A traceable wrapper subclass without its plain tensors: these are numbers in `inner`."""

    kind: type
    names: tuple[str, ...]
    inner: tuple[Structure, ...]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]


Structure: TypeAlias = Wrapper | int
Sent: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Extension:
    """What a parameter is while it is gathered.

    sent: size and dtype of each tensor that this rank sends, the same on all ranks. arrived: all
    ranks' tensors, one rank after the other. made: the plain tensors of the unsharded parameter.
    """

    sent: Sent
    arrived: tuple[Place, ...]
    made: tuple[Place, ...]
    structure: Structure
    held_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Of one rank."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.sent)


# By number, for the life of the process: a number may stand in any compiled graph.
_KNOWN: dict[int, Extension] = {}
_NUMBERS = itertools.count()


def has_extensions(raw: Any) -> bool:
    """raw: an FSDPParam."""
    return hasattr(raw._sharded_local_tensor, "fsdp_pre_all_gather")


def extension_number(extension: Extension | None) -> int:
    """The same for equal ones, so that identical blocks share one graph."""
    if extension is None:
        return NONE
    for number, known in _KNOWN.items():
        if _same(known, extension):
            return number
    number = next(_NUMBERS)
    _KNOWN[number] = extension
    return number


def rebuild(memory: Tensor, number: int) -> Tensor:
    """The unsharded parameter that stands in `memory`. No gradient flows through this."""
    extension = _KNOWN[number]
    return _wrapped(extension.structure, [place.within(memory) for place in extension.made])


# -- what travels, and what is made of it ----------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def read_extension(raw: Any, ranks: int) -> tuple[Extension, Any]:
    """The plan for one FSDPParam, from what FSDP2 makes of undefined bytes; and its unsharded
    parameter without memory, where FSDP2 had none.

    On all ranks together: what is sent may depend on all of them (a scale, for one). FSDP2 has to
    be SHARDED. Raises what the extensions raise, and TypeError for a result that cannot be traced.
    """
    own = plain_tensors(raw._sharded_local_tensor)
    with next((t.fake_mode for t in own if isinstance(t, FakeTensor)), nullcontext()):
        return _read(raw, ranks)


def _read(raw: Any, ranks: int) -> tuple[Extension, Any]:
    sends = raw.all_gather_inputs
    sizes, dtypes = _sizes(raw), [tensor.dtype for tensor in sends]
    was_gathered = hasattr(raw, "_unsharded_param")
    if was_gathered:
        raw._extensions_data.clear()
    else:
        raw.init_all_gather_outputs([t.numel() for t in sends], dtypes, ranks, raw.device)
        raw.alloc_all_gather_outputs()
        raw.init_unsharded_param()
        raw.free_unsharded_param()
    leaf = raw._unsharded_param
    sent = tuple(zip(sizes, dtypes, strict=True))
    arrived = _arrived(sent, ranks)
    structure, parts = _taken_apart(leaf._local_tensor if raw.is_dtensor else leaf.detach())
    front = [o for o, p in zip(raw.all_gather_outputs, arrived, strict=True) if not p.offset_bytes]
    made, held_bytes = _made(parts, front, _end_bytes(arrived))
    extension = Extension(sent, arrived, made, structure, held_bytes)
    if was_gathered:
        return extension, None
    del raw._unsharded_param
    return extension, leaf


def send(raw: Any, extension: Extension) -> tuple[list[Tensor], Any]:
    """What this rank sends, one-dimensional, and what `fill` needs of it.

    Raises RuntimeStateError where it is not what was planned.
    """
    tensors, sent, metadata = _before(raw)
    if sent != extension.sent:
        raise _changed(raw, f"sends {sent} now; the first gather sent {extension.sent}")
    return tensors, metadata


def fill(raw: Any, extension: Extension, memory: Tensor, metadata: Any) -> None:
    """`memory`, in which all ranks' tensors have arrived, gets what is made of them.

    Raises RuntimeStateError where that is not what was planned.
    """
    whole = _after(raw, _handed_over(extension.arrived, memory), metadata)
    _put(raw, extension, whole, memory)


def take_over(raw: Any, extension: Extension, memory: Tensor) -> None:
    """`memory` gets what FSDP2 itself has gathered and made."""
    whole = raw._unsharded_param
    _put(raw, extension, whole._local_tensor if raw.is_dtensor else whole, memory)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """What `tensor` is made of; itself if it is plain."""
    return _taken_apart(tensor)[1]


@torch.no_grad()
def _before(raw: Any) -> tuple[list[Tensor], Sent, Any]:
    tensors = raw.all_gather_inputs
    sizes, metadata = _sizes(raw), raw._extensions_data.all_gather_metadata
    raw._extensions_data.clear()
    return tensors, tuple(zip(sizes, [t.dtype for t in tensors], strict=True)), metadata


def _sizes(raw: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, raw._extensions_data.all_gather_input_sizes))


@torch.no_grad()
def _after(raw: Any, arrived: Sequence[Tensor], metadata: Any) -> Tensor:
    dtype = raw.param_dtype or raw.orig_dtype
    local = raw._sharded_local_tensor
    whole, _ = local.fsdp_post_all_gather(tuple(arrived), metadata, dtype)
    # As FSDP2 does it: this cuts off padding.
    return torch.as_strided(whole, raw._orig_size, raw._contiguous_orig_stride, storage_offset=0)


@torch.no_grad()
def _put(raw: Any, extension: Extension, whole: Tensor, memory: Tensor) -> None:
    structure, parts = _taken_apart(whole)
    kinds = [(tuple(part.size()), part.dtype) for part in parts]
    planned = [(place.size, place.dtype) for place in extension.made]
    if kinds != planned or not _same(structure, extension.structure):
        raise _changed(raw, f"is made of {kinds} now, of {planned} when its graph was traced")
    start = memory.data_ptr()
    for part, place in zip(parts, extension.made, strict=True):
        if part.data_ptr() != start + place.offset_bytes or part.stride() != place.stride:
            place.within(memory).copy_(part)


def _changed(raw: Any, text: str) -> RuntimeStateError:
    kind = type(raw._sharded_local_tensor).__name__
    return RuntimeStateError(
        "GS406",
        f"{raw._param_fqn}, a {kind}, {text}: its all-gather extensions have to give tensors of "
        "the same sizes, dtypes and attributes each time",
    )


# -- the memory ------------------------------------------------------------------------------------


def _arrived(sent: Sent, ranks: int) -> tuple[Place, ...]:
    wholes = [(ranks * size[0], *size[1:]) if size else (ranks,) for size, _ in sent]
    bytes_of = [math.prod(w) * dtype.itemsize for w, (_, dtype) in zip(wholes, sent, strict=True)]
    places: dict[int, Place] = {}
    for i in sorted(range(len(sent)), key=lambda i: -bytes_of[i]):
        offset_bytes = _end_bytes(list(places.values()))
        places[i] = Place(
            wholes[i], make_contiguous_strides_for(wholes[i]), sent[i][1], offset_bytes
        )
    return tuple(places[i] for i in range(len(sent)))


def _handed_over(arrived: Sequence[Place], memory: Tensor) -> list[Tensor]:
    """What arrived, each at the start of its storage: there the subclasses' own views begin."""
    views = [place.within(memory) for place in arrived]
    return [v.clone() if p.offset_bytes else v for p, v in zip(arrived, views, strict=True)]


def _end_bytes(places: Sequence[Place]) -> int:
    ends = [p.offset_bytes + p.extent * p.dtype.itemsize for p in places]
    return _aligned(max(ends, default=0))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _made(
    parts: Sequence[Tensor], front: Sequence[Tensor], end_bytes: int
) -> tuple[tuple[Place, ...], int]:
    """Where each of `parts` stands: where it is if it is a view of what arrives in front, else
    behind `end_bytes`. And the new end."""
    addresses = [tensor.untyped_storage()._cdata for tensor in front]
    places = []
    for part in parts:
        size, stride = tuple(part.size()), tuple(part.stride())
        if part.untyped_storage()._cdata in addresses:
            offset_bytes = int(part.storage_offset()) * part.itemsize
            places.append(Place(size, stride, part.dtype, offset_bytes))
            continue
        dense = tuple(map(int, torch.empty_like(part, device="meta").stride()))
        places.append(Place(size, dense, part.dtype, end_bytes))
        end_bytes += _end_bytes([Place(size, dense, part.dtype, 0)])
    return tuple(places), end_bytes


# -- subclasses ------------------------------------------------------------------------------------


def _taken_apart(tensor: Tensor) -> tuple[Structure, list[Tensor]]:
    parts: list[Tensor] = []

    def take(found: Tensor) -> Structure:
        if not is_traceable_wrapper_subclass(found):
            if type(found) not in (Tensor, Parameter, FakeTensor):
                raise TypeError(f"{type(found).__name__} has no __tensor_flatten__")
            parts.append(found)
            return len(parts) - 1
        names, context = found.__tensor_flatten__()
        inner = tuple(take(getattr(found, name)) for name in names)
        size, stride = tuple(found.size()), tuple(found.stride())
        return Wrapper(type(found), tuple(names), inner, context, size, stride)

    return take(tensor), parts


def _wrapped(structure: Structure, parts: Sequence[Tensor]) -> Tensor:
    if isinstance(structure, int):
        return parts[structure]
    inner = [_wrapped(one, parts) for one in structure.inner]
    made: Tensor = structure.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
        dict(zip(structure.names, inner, strict=True)),
        structure.context,
        torch.Size(structure.size),
        structure.stride,
    )
    return made


def _same(one: object, other: object) -> bool:
    """What cannot be compared (a context with a tensor in it, say) is not the same."""
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False
