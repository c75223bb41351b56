"""Each tensor of a step from the op that makes it to the last one that reads it.

In: what is alive in each direction's graph. Out: one `Lifetime` for each piece of memory that the
step's ops make, from forward into backward where it is saved. What the caller brings is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphshard.pricing.liveness import Kind, Memory
from graphshard.schedule.plan import Direction


class At(NamedTuple):
    """Compute op `op` of a direction."""

    direction: Direction
    op: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """is_gradient: of a parameter, on its way to a reduction. is_wanted: as of `Memory`; eager
    selective checkpointing stores it also where backward does not read it."""

    size_bytes: int
    born: At
    last: At
    is_gradient: bool = False
    is_wanted: bool = False


def lifetimes(forward: Sequence[Memory], backward: Sequence[Memory]) -> tuple[Lifetime, ...]:
    """In the order in which their ops run. backward: nothing if there is none."""
    saved = {memory.name: memory for memory in backward if memory.kind is Kind.INPUTS}
    return in_order([*_of_forward(forward, saved), *_of_backward(backward)])


def in_order(found: Iterable[Lifetime]) -> tuple[Lifetime, ...]:
    """By when they begin."""
    order = list(Direction)
    return tuple(sorted(found, key=lambda one: (order.index(one.born.direction), one.born.op)))


def _of_forward(forward: Sequence[Memory], saved: dict[str, Memory]) -> Iterator[Lifetime]:
    for memory in forward:
        if memory.kind is Kind.INPUTS or not memory.size_bytes:
            continue
        last = At(Direction.FORWARD, memory.last)
        if (later := saved.get(memory.name)) is not None:
            last = At(Direction.BACKWARD, later.last)
        born = At(Direction.FORWARD, memory.born)
        yield Lifetime(memory.size_bytes, born, last, is_wanted=memory.is_wanted)


def _of_backward(backward: Sequence[Memory]) -> Iterator[Lifetime]:
    for memory in backward:
        if memory.kind is Kind.INPUTS or not memory.size_bytes:
            continue
        born, last = (At(Direction.BACKWARD, op) for op in (memory.born, memory.last))
        yield Lifetime(memory.size_bytes, born, last, memory.kind is Kind.GRADS)
