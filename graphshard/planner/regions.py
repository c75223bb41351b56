"""The compute of a direction as events: what choices make of each region.

In come a problem and `Choices`; out comes one event per region, with the activations that are alive
and the gradients it creates. Choices change few regions, so `RegionState` says all that they change
of one: for an equal state the event is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from graphshard.planner.choices import Choices, offloads_taken
from graphshard.planner.events import Event, total_bytes
from graphshard.planner.problem import Category, Problem
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Direction, Step, StepKind


@dataclass(frozen=True, slots=True)
class RegionState:
    """What choices make of region `index`: op is its first. extra_us: for what it computes again.
    taken, given: activations in bytes that come alive in it, and that do not outlive it. idle:
    those that are not alive all the time."""

    index: int
    op: int
    extra_us: float
    taken: int
    given: int
    idle: int


def region_events(problem: Problem, choices: Choices, direction: Direction) -> list[Event]:
    """One event per region, with the activations that are alive and the gradients it creates."""
    born = born_gradients(problem, direction)
    states = region_states(problem, choices, direction)
    return [region_event(problem, direction, state, born) for state in states]


def region_states(
    problem: Problem, choices: Choices, direction: Direction
) -> Iterator[RegionState]:
    inside, between = _activations(problem, choices, direction)
    extra_us: dict[int, float] = defaultdict(float)
    if direction is Direction.BACKWARD:
        for option in (problem.recompute[index] for index in choices.recompute):
            extra_us[option.before] += option.extra_us
    op = 0
    for index, region in enumerate(problem.regions(direction)):
        alive = inside[index]
        yield RegionState(
            index,
            op,
            extra_us[index],
            taken=alive - between[index],
            given=alive - between[index + 1],
            idle=min(region.idle_bytes, alive),
        )
        op += region.num_ops


def born_gradients(problem: Problem, direction: Direction) -> dict[int, list[Allocation]]:
    """The unsharded gradients that each region creates."""
    born: dict[int, list[Allocation]] = defaultdict(list)
    if direction is Direction.BACKWARD:
        for group in problem.groups:
            for grad in (p.gradient for p in group.parts if p.gradient is not None):
                born[grad.first].append(Allocation(Category.UNSHARDED_GRAD, grad.bytes, group.id))
    return born


def region_event(
    problem: Problem,
    direction: Direction,
    state: RegionState,
    born: Mapping[int, list[Allocation]],
) -> Event:
    region = problem.regions(direction)[state.index]
    takes = (_activation(state.taken), *born.get(state.index, ()))
    more = Allocation(Category.TEMP, region.temporary_bytes)
    absent = (_activation(state.idle), *region.absent)
    # What is there before or after a region is there in it, too.
    most_absent = min(total_bytes((*takes, more)), state.given)
    return Event(
        Step(StepKind.COMPUTE, start=state.op, stop=state.op + region.num_ops),
        us=region.us + state.extra_us,
        takes=takes,
        briefly=(more, *_taken_off(absent, most_absent)),
        gives=(_activation(state.given),),
    )


def _taken_off(absent: Iterable[Allocation], limit_bytes: int) -> Iterator[Allocation]:
    """`absent` as negative claims, `limit_bytes` at most."""
    for allocation in absent:
        size = min(allocation.bytes, limit_bytes)
        limit_bytes -= size
        yield replace(allocation, bytes=-size)


def _activation(amount: int) -> Allocation:
    return Allocation(Category.ACTIVATION, amount)


def _activations(
    problem: Problem, choices: Choices, direction: Direction
) -> tuple[list[int], list[int]]:
    """Bytes alive in each region, and before, between and after the regions.

    Between two regions at most what both hold is alive, from forward to backward too. What is
    recomputed is not alive after region `after` of forward and until region `before` of backward,
    nor is what is offloaded: the copies hold it for as long as they take.
    """
    inside = [r.activation_bytes for r in problem.regions(direction)]
    handed_over = 0
    if problem.backward:
        handed_over = min(
            problem.forward[-1].activation_bytes, problem.backward[0].activation_bytes
        )
    forward = direction is Direction.FORWARD
    ends = (0, handed_over) if forward else (handed_over, 0)
    between = [ends[0], *map(min, inside, inside[1:]), ends[1]]
    spared = _spared(problem, choices, direction)
    return (
        _less(inside, spared[:-1] if forward else spared[1:]),
        _less(between, spared),
    )


def _spared(problem: Problem, choices: Choices, direction: Direction) -> list[int]:
    """Bytes that wait to be recomputed, or on the host, before, between and after the regions."""
    changes = [0] * (len(problem.regions(direction)) + 1)
    forward = direction is Direction.FORWARD
    for option in (problem.recompute[index] for index in choices.recompute):
        changes[option.after + 1 if forward else option.before] += option.saved_bytes
    for offload in offloads_taken(problem, choices):
        changes[offload.after + 1 if forward else offload.before] += offload.bytes
    if forward:
        return list(accumulate(changes))
    return [*accumulate(reversed(changes))][::-1]


def _less(alive: Iterable[int], spared: Iterable[int]) -> list[int]:
    return [max(0, amount - less) for amount, less in zip(alive, spared, strict=True)]
