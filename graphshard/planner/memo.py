"""A problem with what was already worked out about it, so that nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphshard.planner.problem import Problem

T = TypeVar("T")
KEPT = 6


@dataclass(slots=True)
class Memo:
    """made: results of pure functions of `problem`, by what they were asked for.

    recent: large results by kind, the last few of each.
    """

    problem: Problem
    made: dict[Hashable, Any] = field(default_factory=dict)
    recent: dict[str, dict[Hashable, Any]] = field(default_factory=dict)


def once(memo: Memo, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, called the first time that `key` is asked for."""
    if key not in memo.made:
        memo.made[key] = make()
    found: T = memo.made[key]
    return found


def recently(memo: Memo, kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, unless the same was asked for a short while ago."""
    shelf = memo.recent.setdefault(kind, {})
    found: T = shelf.pop(key) if key in shelf else make()
    shelf[key] = found  # at the end, as the latest
    if len(shelf) > KEPT:
        del shelf[next(iter(shelf))]
    return found
