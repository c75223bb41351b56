"""The few operations that formulas need beyond + - * /, for numbers and sympy expressions alike.

A formula is written once. Given numbers it returns a number and never imports sympy; given at
least one sympy expression it returns an expression.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

# int, float or sympy.Expr; sympy ships no types.
Quantity: TypeAlias = Any

_NUMBERS = (int, float)


def is_number(*quantities: Quantity) -> bool:
    return all(isinstance(q, _NUMBERS) for q in quantities)


def least(*quantities: Quantity) -> Quantity:
    if is_number(*quantities):
        return min(quantities)
    import sympy

    return sympy.Min(*quantities)


def most(*quantities: Quantity) -> Quantity:
    if is_number(*quantities):
        return max(quantities)
    import sympy

    return sympy.Max(*quantities)


def ceil_div(numerator: Quantity, denominator: Quantity) -> Quantity:
    """The quotient of two positive integers, rounded up."""
    if is_number(numerator, denominator):
        return -(-numerator // denominator)
    import sympy

    return sympy.ceiling(sympy.sympify(numerator) / denominator)


def if_one(quantity: Quantity, then: Quantity, otherwise: Quantity) -> Quantity:
    """`then` where the positive integer `quantity` is 1, else `otherwise`."""
    if is_number(quantity):
        return then if quantity == 1 else otherwise
    import sympy

    return sympy.Piecewise((then, sympy.Eq(quantity, 1)), (otherwise, True))


def if_at_most(
    quantity: Quantity, limit: Quantity, then: Quantity, otherwise: Quantity
) -> Quantity:
    """`then` where `quantity` is `limit` or less, else `otherwise`."""
    if is_number(quantity, limit):
        return then if quantity <= limit else otherwise
    import sympy

    return sympy.Piecewise((then, quantity <= limit), (otherwise, True))


def part_between(amount: Quantity, low: float, high: float) -> Quantity:
    """How much of the range from 0 to `amount` lies between `low` and `high` (may be inf)."""
    capped = amount if math.isinf(high) else least(amount, high)
    return capped if low == 0 else most(capped - low, 0)
