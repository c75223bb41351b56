"""Tensor parallel as a model plans it: `tp_plan`, of the model or of the outermost module with one.

It maps names of modules, as `parallelize_module` takes them ("layers.*.attention.query"), to
styles: torch's, or the words that transformers has for them; or it is a function that is called
with the mesh and does it all itself. In: a model without shards, and a mesh of one node's
neighbours. Out: the model with that plan on the mesh, or a typed reason why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from graphshard.schedule.setting import NoTensor, TensorObstacle

ATTRIBUTE = "tp_plan"


@dataclass(frozen=True, slots=True)
class _Word:
    """text: the Python that makes it."""

    make: Callable[[], ParallelStyle]
    text: str


_GATHERED = _Word(
    lambda: ColwiseParallel(output_layouts=Replicate()),
    "ColwiseParallel(output_layouts=Replicate())",
)
_FROM_WHOLE = _Word(
    lambda: RowwiseParallel(input_layouts=Replicate()),
    "RowwiseParallel(input_layouts=Replicate())",
)
# transformers 4 and 5, integrations/tensor_parallel.py. What it has beyond these (experts, packed
# weights, norms of heads) has no counterpart among torch's styles; what "sequence_parallel" gives
# to the next module depends on the version.
WORDS = {
    "colwise": _Word(ColwiseParallel, "ColwiseParallel()"),
    "rowwise": _Word(RowwiseParallel, "RowwiseParallel()"),
    "colwise_rep": _GATHERED,
    "colwise_gather_output": _GATHERED,
    "rowwise_rep": _FROM_WHOLE,
    "rowwise_split_input": _FROM_WHOLE,
    "embedding_rowwise": _FROM_WHOLE,
}


class NoTensorError(Exception):
    """Carries why a model cannot be parallelized so."""

    def __init__(self, found: NoTensor) -> None:
        super().__init__(f"{found.why}: {found.what}")
        self.found = found


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """module: the name of the one that has it; "" is the model. styles: by name, a word or a style;
    None: it is a function. matches: the modules (of the model) that each name stands for."""

    module: str
    styles: Mapping[str, str | ParallelStyle] | None
    matches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def plan_of(model: nn.Module) -> TensorPlan | None:
    """None without any."""
    for name, module in model.named_modules():
        found = getattr(module, ATTRIBUTE, None)
        if callable(found):
            return TensorPlan(name, None)
        if found:
            styles = dict(found)
            prefix = f"{name}." if name else ""
            matches = {key: tuple(prefix + own for own in _named(module, key)) for key in styles}
            return TensorPlan(name, styles, matches)
    return None


def word_texts(plan: TensorPlan) -> list[str]:
    """The Python of the styles that the plan has words for."""
    return [WORDS[style].text for style in (plan.styles or {}).values() if isinstance(style, str)]


def obstacle_in(plan: TensorPlan) -> NoTensor | None:
    """Why the plan cannot be had on any mesh, as far as that can be seen without one."""
    for name, style in (plan.styles or {}).items():
        if not isinstance(style, ParallelStyle) and style not in WORDS:
            return NoTensor(TensorObstacle.STYLE, str(style))
        if not plan.matches[name]:
            return NoTensor(TensorObstacle.NAME, name)
    return None


def _named(module: nn.Module, name: str) -> list[str]:
    """The modules in it that `parallelize_module` takes `name` for."""
    found = {"": module}
    for token in name.split(".") if name else ():
        found = {
            f"{own}.{key}" if own else key: child
            for own, parent in found.items()
            for key, child in parent.named_children()
            if fnmatch(key, token)
        }
    return list(found)


def are_planned_alike(plan: TensorPlan, blocks: Sequence[str]) -> bool:
    """The modules of all of these blocks have the same styles."""
    assert plan.styles is not None
    found: dict[str, list[tuple[str, str]]] = {block: [] for block in blocks}
    for name, style in plan.styles.items():
        for module in plan.matches[name]:
            block = next((b for b in blocks if module == b or module.startswith(f"{b}.")), None)
            if block is not None:
                found[block].append((module.removeprefix(block), repr(style)))
    return all(own == found[blocks[0]] for own in found.values())


def parallelize(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Raises NoTensorError, or what the model's function or `parallelize_module` raises."""
    shared = _shared_names(model)
    _parallelize(model.get_submodule(plan.module), plan, mesh)
    _check(model, shared, mesh.size())


def _parallelize(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    if plan.styles is None:
        getattr(module, ATTRIBUTE)(mesh)
        return
    parallelize_module(
        module,
        mesh,
        {
            name: WORDS[style].make() if isinstance(style, str) else style
            for name, style in plan.styles.items()
        },
    )


def _check(model: nn.Module, shared: Mapping[str, str], degree: int) -> None:
    """What is captured on one rank has to be what all ranks do. shared: `_shared_names` before."""
    after = _shared_names(model)
    for name, first in shared.items():
        if after.get(name) != first:
            raise NoTensorError(NoTensor(TensorObstacle.TIED, name))
    for name, param in model.named_parameters():
        if any(param.shape[dim] % degree for dim in _cut_dims(param)):
            raise NoTensorError(NoTensor(TensorObstacle.UNEVEN, name))


def _cut_dims(param: Any) -> Iterator[int]:
    if isinstance(param, DTensor):
        yield from (placed.dim for placed in param.placements if isinstance(placed, Shard))


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Of each parameter that has several names, all but the first -> the first."""
    firsts: dict[int, str] = {}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(param), name)
        if first != name:
            found[name] = first
    return found
