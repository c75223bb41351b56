"""Mixed integer programs in a few words: expressions, variables, rows, and HiGHS to solve them.

An expression is a constant and a factor per variable. Every variable has bounds, so that the
least value of an expression is known: `Program.implied` needs no guessed "big M".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

OPTIMAL, INFEASIBLE = 0, 2  # scipy's status


class Unsolved(Exception):
    """Neither an optimum nor a proof that there is none: too little time, or HiGHS failed."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant` plus the sum of factor times variable."""

    factors: dict[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def __add__(self, other):
        other = other if isinstance(other, Linear) else Linear({}, other)
        factors = dict(self.factors)
        for variable, factor in other.factors.items():
            factors[variable] = factors.get(variable, 0.0) + factor
        return Linear(factors, self.constant + other.constant)

    __radd__ = __add__

    def __mul__(self, number):
        return Linear({v: f * number for v, f in self.factors.items()}, self.constant * number)

    __rmul__ = __mul__

    def __sub__(self, other):
        return self + other * -1

    def __rsub__(self, other):
        return self * -1 + other


NO, YES = Linear({}, 0.0), Linear({}, 1.0)


@dataclass(slots=True)
class Program:
    """Variables with bounds, and rows: expressions that are at least 0."""

    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[Linear] = field(default_factory=list)

    def variable(self, low, high, *, whole=0):
        self.lows.append(low)
        self.highs.append(high)
        self.whole.append(whole)
        return Linear({len(self.lows) - 1: 1.0})

    def binary(self):
        return self.variable(0, 1, whole=1)

    def least(self, expression):
        ends = (
            factor * (self.lows[v] if factor > 0 else self.highs[v])
            for v, factor in expression.factors.items()
        )
        return expression.constant + sum(ends)

    def positive(self, expression):
        """`expression` >= 0, where its bounds do not say so already.

        Its largest factor becomes 1: bytes and microseconds side by side, HiGHS fails now and then.
        """
        if self.least(expression) < 0:
            largest = max(map(abs, expression.factors.values()), default=1.0) or 1.0
            self.rows.append(expression * (1 / largest))

    def equal(self, one, other):
        self.positive(one - other)
        self.positive(other - one)

    def implied(self, condition, expression):
        """`expression` >= 0 where `condition`, which is 0 or 1 (or less than 0), is 1."""
        slack = -self.least(expression)
        if slack > 0:
            self.positive(expression + slack * (1 - condition))

    def minimize(self, expression, seconds):
        """(least value, value of each variable), or None if no values fit all rows."""
        cost = np.zeros(len(self.lows))
        for variable, factor in expression.factors.items():
            cost[variable] = factor
        found = milp(
            cost,
            integrality=self.whole,
            bounds=Bounds(self.lows, self.highs),
            constraints=self._matrix(),
            options={"mip_rel_gap": 0.0, "time_limit": seconds},
        )
        if found.status == INFEASIBLE:
            return None
        if found.status != OPTIMAL:
            raise Unsolved(found.message)
        return found.fun + expression.constant, found.x

    def _matrix(self):
        data, columns, starts = [], [], [0]
        for row in self.rows:
            data += row.factors.values()
            columns += row.factors
            starts.append(len(data))
        matrix = csr_array((data, columns, starts), shape=(len(self.rows), len(self.lows)))
        return LinearConstraint(matrix, lb=[-row.constant for row in self.rows])


def value_of(expression, values):
    return expression.constant + sum(f * values[v] for v, f in expression.factors.items())


def is_yes(expression, values):
    return value_of(expression, values) > 0.5
