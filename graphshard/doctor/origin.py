"""Whose difference it is, as data: AOTAutograd's, on which graphshard stands, or not.

What `graphshard.doctor.blame` finds and `graphshard.doctor.text` says. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Param = tuple[str, int]


class Cause(StrEnum):
    """AOTAUTOGRAD: `aot_eager` departs from eager as graphshard does. OTHER: it does not so far."""

    AOTAUTOGRAD = "aotautograd"
    OTHER = "other"
    UNDECIDED = "undecided"


class Doubt(StrEnum):
    """Why nothing is decided. FAILED: the run with `aot_eager` did not come so far. NOT_COMPILED:
    nothing was in a graph of it. ELSEWHERE: it departs in another place, or by another size."""

    FAILED = "failed"
    NOT_COMPILED = "not compiled"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Departure:
    """The first step in which two runs differ by more than allowed; 0: in any bit.

    in_loss: its losses do. params: whose gradients do: name of the group, place in it.
    """

    step: int
    allowed: float
    in_loss: bool
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """step, in_loss, groups: where graphshard departs from eager first.

    is_same: there it has every bit that `aot_eager` has.
    """

    cause: Cause
    step: int
    in_loss: bool
    groups: tuple[str, ...]
    is_same: bool = False
    doubt: Doubt | None = None
