"""A program that was captured with symbols for sizes, with numbers in their place.

Costs and memory are read from the values in `node.meta["val"]`; here they become tensors of the
meta device with plain sizes. The graphs themselves stay: what comes out is priced, never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from graphshard.graph.program import Program, copy_of
from graphshard.pricing.sizes import HINTS


def concrete(program: Program, values: Mapping[str, int]) -> Program:
    """`program` with a number for each symbol in `values`; others count as `Sizes` has it."""
    if not values:
        return program
    reader = _Reader(values)
    return replace(
        program,
        forward=None if program.forward is None else _with_numbers(program.forward, reader),
        backward=None if program.backward is None else _with_numbers(program.backward, reader),
    )


def _with_numbers(module: fx.GraphModule, reader: _Reader) -> fx.GraphModule:
    made = copy_of(module)
    for node in made.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(reader.read, node.meta["val"])
    return made


class _Reader:
    """Reads sizes; each expression is worked out once."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = {name: sympy.Integer(value) for name, value in values.items()}
        self._known: dict[Any, int] = {}

    def read(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self._number(value)
        if not isinstance(value, Tensor):
            return value
        sizes = [self._number(size) for size in value.shape]
        if value.layout != torch.strided:
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        strides = [self._number(stride) for stride in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")

    def _number(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr not in self._known:
            found = expr.xreplace(
                {s: self._values[s.name] for s in expr.free_symbols if s.name in self._values}
            )
            self._known[expr] = int(found if found.is_Integer else HINTS.quantity(size))
        return self._known[expr]
