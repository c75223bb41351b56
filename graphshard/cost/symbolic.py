"""Costs as formulas: printed, and evaluated for another machine or size without a new capture.

In: any function of this package called with the symbols below (or others) in place of numbers.
Out: a `Formula`. There is no second definition: numbers and symbols go through the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import sympy

from graphshard.cost.algebra import Quantity
from graphshard.cost.comm import Network
from graphshard.cost.machine import Machine

WORLD = sympy.Symbol("W", integer=True, positive=True)  # ranks that a group is sharded over
BATCH = sympy.Symbol("B", integer=True, positive=True)  # sequences per rank
LENGTH = sympy.Symbol("S", integer=True, positive=True)  # tokens per sequence
INTRA = sympy.Symbol("intra_bytes_per_us", positive=True)  # bus bandwidth inside a node
INTER = sympy.Symbol("inter_bytes_per_us", positive=True)  # one rank's adapter between nodes
LATENCY = sympy.Symbol("latency_us", positive=True)  # every collective's constant


@dataclass(frozen=True, slots=True)
class Formula:
    """An expression of cost in microseconds or bytes; `str()` of it is for people."""

    expr: Any

    @property
    def free_symbols(self) -> tuple[str, ...]:
        """Names to give values for, sorted."""
        return tuple(s.name for s in _symbols(self.expr))

    def evaluate(self, **values: float) -> float:
        """The value for these symbols, such as `evaluate(W=64)`.

        Raises TypeError, which names them, if a symbol is missing or not part of the formula.
        """
        names, compiled = _function(self.expr)
        if set(names) != set(values):
            missing = [n for n in names if n not in values]
            extra = [n for n in values if n not in names]
            raise TypeError(f"formula in {', '.join(names)}: missing {missing}, unknown {extra}")
        return float(compiled(*(values[n] for n in names)))

    def given(self, **values: float) -> Formula:
        """The formula with some symbols replaced by numbers."""
        known = {s: values[s.name] for s in _symbols(self.expr) if s.name in values}
        return Formula(self.expr.subs(known))

    def __str__(self) -> str:
        short = {f: sympy.Float(f, 4) for f in self.expr.atoms(sympy.Float)}
        return str(self.expr.xreplace(short))


def formula(quantity: Quantity) -> Formula:
    """A number or an expression as a Formula."""
    return Formula(sympy.sympify(quantity))


def with_symbolic_network(machine: Machine) -> Machine:
    """The preset network with bandwidths as symbols and LATENCY as each protocol's constant.

    Measurements are left out: they are for one network only.
    """
    network = machine.network
    protocols = tuple(replace(p, base_us=LATENCY) for p in network.protocols)
    symbolic = Network(INTRA, INTER, protocols, network.traffic, levels=network.levels)
    return replace(machine, network=symbolic, measured=())


def _symbols(expr: Any) -> list[Any]:
    return sorted(expr.free_symbols, key=lambda s: s.name)


@cache
def _function(expr: Any) -> tuple[tuple[str, ...], Any]:
    """The names of an expression's symbols, and a function of their values in that order."""
    symbols = _symbols(expr)
    places = {s: _place(i) for i, s in enumerate(symbols)}
    return tuple(s.name for s in symbols), _compiled(expr.xreplace(places), len(symbols))


@cache
def _compiled(expr: Any, num_symbols: int) -> Any:
    """One function per structure: formulas that differ in names only share it."""
    return sympy.lambdify([_place(i) for i in range(num_symbols)], expr, modules="math", cse=True)


def _place(index: int) -> Any:
    return sympy.Dummy(f"x{index}", dummy_index=index, positive=True)
