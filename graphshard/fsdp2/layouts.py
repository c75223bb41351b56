"""DTensors inside a graph: parameters that were DTensors before `fully_shard`, and gradients.

That is how tensor parallel meets FSDP2: it gathers the local tensors over the data-parallel ranks
and wraps the result as a DTensor on the rest of the mesh. A graph names a layout (mesh,
placements, global shape) by its number, so that identical blocks share one graph.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

PLAIN = -1  # the number of a plain tensor's layout


@dataclass(frozen=True, slots=True)
class _Layout:
    """A DTensorSpec apart from its mesh, which it would keep alive."""

    mesh: weakref.ref[DeviceMesh]
    bare: Any

    def whole(self) -> Any:
        """The spec; None if its mesh is gone."""
        mesh = self.mesh()
        return None if mesh is None else _on_mesh(self.bare, mesh)


# Layouts by number, as long as their meshes live: a number may stand in any compiled graph.
_LAYOUTS: dict[int, _Layout] = {}
_NUMBERS = itertools.count()


def layout_number(spec: Any) -> int:
    """The number of a DTensorSpec (None: a plain tensor), the same for equal ones.

    Equal meshes that are different objects count as different: tracing compares objects.
    """
    if spec is None:
        return PLAIN
    for number, known in tuple(_LAYOUTS.items()):
        if known.mesh() is spec.mesh and known.whole() == spec:
            return number
    number = next(_NUMBERS)
    mesh = weakref.ref(spec.mesh, lambda _: _LAYOUTS.pop(number, None))
    _LAYOUTS[number] = _Layout(mesh, _on_mesh(spec, None))
    return number


def _on_mesh(spec: Any, mesh: DeviceMesh | None) -> Any:
    other = copy.copy(spec)
    other.mesh = mesh
    return other


def as_dtensor(local: Tensor, layout: int) -> DTensor:
    """`local` in this layout, in its own dtype. No gradient flows through this."""
    spec = _LAYOUTS[layout].whole()
    meta = spec.tensor_meta
    if meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)


def split_dtensor(grad: Tensor) -> tuple[Tensor, int]:
    """The local tensor and the layout's number."""
    if not isinstance(grad, DTensor):
        return grad, PLAIN
    return _finished(grad._local_tensor), layout_number(grad._spec)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in the same layout; `DTensor.clone` reduces a partial one on some versions."""
    local, layout = split_dtensor(tensor)
    return local.clone() if layout == PLAIN else as_dtensor(local.clone(), layout)


def _finished(local: Tensor) -> Tensor:
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor
    return local if wait is None else wait()
