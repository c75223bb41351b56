"""Steps with their costs: what each step of a schedule takes, holds and gives back.

An `Event` is what `simulate.play` runs. The memory rules are those of `graphshard.runtime`: a
gather allocates its bucket when it is issued; its wait allocates the parameters and then frees
the bucket; a reduction allocates its packed input and its output when it is issued and drops the
unsharded gradients; its wait frees the input. An all-reduce works on that output, which is handed
over when it is waited for. In place, a gather allocates the parameters when it
is issued, and a reduction keeps the gradients until its wait. One rank needs no bucket and no
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from graphshard.planner.activations import Offload
from graphshard.planner.choices import (
    Bucket,
    Choices,
    parts_of,
    transfer_us,
)
from graphshard.planner.problem import Category, Gradient, Problem, gather_of
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Direction, Step, StepKind
from graphshard.schedule.steps import WAIT_OF

# Jobs of copies are numbered from here on, beyond those of all collectives of a direction.
FIRST_COPY = 1 << 40


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One micro-step. The first finds nothing gathered, the last leaves nothing gathered."""

    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A step and its costs.

    us: on the compute lane. lane, comm_us: the collective that an issue starts; job: what pairs the
    issue with its wait (-1: no collective); after: the job that it cannot start before. takes:
    memory from the start of the step on; briefly: memory during the step only, negative for what is
    absent then; gives: memory given back at its end.
    """

    step: Step
    us: float = 0.0
    lane: int = -1
    comm_us: float = 0.0
    job: int = -1
    takes: tuple[Allocation, ...] = ()
    briefly: tuple[Allocation, ...] = ()
    gives: tuple[Allocation, ...] = ()
    after: int = -1
    alloc_bytes: int = field(init=False)
    brief_bytes: int = field(init=False)
    free_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alloc_bytes", total_bytes(self.takes))
        object.__setattr__(self, "brief_bytes", total_bytes(self.briefly))
        object.__setattr__(self, "free_bytes", total_bytes(self.gives))


def total_bytes(allocations: tuple[Allocation, ...]) -> int:
    return sum(allocation.bytes for allocation in allocations)


def micro_steps_of(problem: Problem) -> tuple[tuple[MicroStep, int], ...]:
    """The different micro-steps of a step, and how often each comes."""
    count = problem.micro_steps
    if count == 1:
        return ((MicroStep(), 1),)
    ends = (
        (MicroStep(True, False), 1),
        (MicroStep(False, False), count - 2),
        (MicroStep(False, True), 1),
    )
    return tuple((micro, times) for micro, times in ends if times)


def start_allocations(
    problem: Problem, choices: Choices, micro: MicroStep
) -> tuple[Allocation, ...]:
    """What is in memory when a micro-step starts."""
    allocations = list(problem.resident)
    if not micro.first:
        for number in choices.across:
            size = problem.groups[number].room_bytes
            allocations.append(Allocation(Category.UNSHARDED_PARAM, size, number))
        for group in problem.groups:
            for grad in (p.gradient for p in group.parts if p.gradient is not None):
                if not problem.sync_each:
                    allocations.append(Allocation(Category.UNSHARDED_GRAD, grad.bytes, group.id))
                elif not problem.has_gradients:
                    allocations.append(
                        Allocation(Category.SHARDED_GRAD, grad.output_bytes, group.id)
                    )
    return tuple(allocations)


def given_gradients(problem: Problem) -> tuple[Allocation, ...]:
    """Unsharded gradients that are inputs of backward."""
    return tuple(
        Allocation(Category.UNSHARDED_GRAD, part.gradient.bytes, group.id)
        for group in problem.groups
        for part in group.parts
        if part.gradient is not None and part.gradient.first < 0
    )


# -- gathers -------------------------------------------------------------------------------------


def gather_events(
    problem: Problem,
    bucket: Bucket,
    direction: Direction,
    *,
    resident: bool = False,
    on_node: bool = False,
) -> tuple[Event, Event]:
    """Issue and wait of one all-gather. `resident`: still gathered, so that nothing runs. on_node:
    from what the ranks of the node hold."""
    parts = list(parts_of(problem, bucket))
    first = problem.groups[bucket.groups[0]]
    kept = resident and direction is Direction.BACKWARD
    kinds = (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT)
    steps = [replace(_step(problem, bucket, kind), kept=kept, on_node=on_node) for kind in kinds]
    if resident:
        return Event(steps[0]), Event(steps[1])
    transfers = [gather_of(part, direction, on_node=on_node) for _, part in parts]
    params = tuple(Allocation(Category.UNSHARDED_PARAM, g.room_of(p), g.id) for g, p in parts)
    pack_us = sum(t.before_us for t in transfers)
    if first.world_size == 1:
        return Event(steps[0], us=pack_us, takes=params), Event(steps[1])
    lane = first.lane_in(direction, on_node=on_node)
    own = problem.lanes[lane]
    in_place = all(t.in_place for t in transfers)
    held = [_held_by_smaller_mesh(problem, n, on_node=on_node) for n in bucket.groups]
    copies = _copies(problem)
    flight = tuple(Allocation(Category.ALL_GATHER, copies * c.bytes, c.group) for c in params)
    issue = Event(
        steps[0],
        us=pack_us + own.issue_us,
        lane=lane,
        comm_us=transfer_us([t.us for t in transfers], own.launch_us),
        job=_job(problem, bucket, 0),
        takes=params if in_place else flight,
        gives=tuple(chain.from_iterable(held)) if direction is Direction.BACKWARD else (),
    )
    unpack_us = sum(t.after_us for t in transfers) + own.wait_us
    if in_place:
        return issue, Event(steps[1], us=unpack_us, job=issue.job)
    return issue, Event(steps[1], us=unpack_us, job=issue.job, takes=params, gives=flight)


def _copies(problem: Problem) -> int:
    """How often what travels is there."""
    return 2 if problem.clones else 1


def _held_by_smaller_mesh(
    problem: Problem, number: int, *, on_node: bool
) -> tuple[Allocation, ...]:
    """What stays between forward and backward although the group is resharded."""
    mesh = problem.groups[number].smaller_mesh(on_node=on_node)
    held_bytes = 0 if mesh is None else mesh.held_bytes
    return (Allocation(Category.UNSHARDED_PARAM, held_bytes, number),) if held_bytes else ()


def release_event(
    problem: Problem, number: int, choices: Choices, direction: Direction, *, is_left: bool
) -> Event:
    """The end of a group's last use in one direction. is_left: gathered for the next micro-step."""
    group = problem.groups[number]
    backward_needs = group.use_in(Direction.BACKWARD) is not None
    forward = direction is Direction.FORWARD
    if forward and number in choices.kept and backward_needs:
        return Event(Step(StepKind.RELEASE, number, kept=True))
    step = Step(StepKind.RELEASE, number)
    if is_left:
        return Event(step)
    gathered = (Allocation(Category.UNSHARDED_PARAM, group.room_bytes, number),)
    if not (forward and backward_needs):
        return Event(step, gives=gathered)
    on_node = number in choices.on_node
    held = _held_by_smaller_mesh(problem, number, on_node=on_node)
    return Event(replace(step, on_node=on_node), takes=held, gives=gathered)


# -- reductions ----------------------------------------------------------------------------------


def reduce_events(problem: Problem, bucket: Bucket, micro: MicroStep) -> tuple[Event, Event]:
    """Issue and wait of one reduction. Without gradient sync the gradients stay where they are."""
    first = problem.groups[bucket.groups[0]]
    grads = _grads(problem, bucket)
    kinds = (StepKind.REDUCE_ISSUE, StepKind.REDUCE_WAIT)
    issue, wait = (_step(problem, bucket, kind) for kind in kinds)
    fresh = tuple(Allocation(Category.UNSHARDED_GRAD, g.bytes, n) for n, g in grads)
    if not (micro.last or problem.sync_each):
        return Event(issue, gives=() if micro.first else fresh), Event(wait)
    if not micro.first and not problem.sync_each:
        fresh += fresh  # what earlier micro-steps left, too
    copies = _copies(problem)
    packed = tuple(Allocation(Category.REDUCE_SCATTER, copies * g.input_bytes, n) for n, g in grads)
    reduced = _reduced(grads)
    pack_us = sum(g.reduce.before_us for _, g in grads)
    unpack_us = sum(g.reduce.after_us for _, g in grads)
    # What is all-reduced is dropped after that.
    dropped = () if _is_replicated(problem, bucket) else _dropped(problem, grads, micro)
    if first.world_size == 1:
        return (
            Event(issue, us=pack_us, takes=reduced, gives=fresh),
            Event(wait, us=unpack_us, gives=dropped),
        )
    lane = first.reduce_lane
    own = problem.lanes[lane]
    pack_us, unpack_us = pack_us + own.issue_us, unpack_us + own.wait_us
    comm_us = transfer_us([g.reduce.us for _, g in grads], own.launch_us)
    job = _job(problem, bucket, 1)
    if all(g.reduce.in_place for _, g in grads):
        return (
            Event(issue, pack_us, lane, comm_us, job, takes=reduced),
            Event(wait, unpack_us, job=job, gives=fresh + dropped),
        )
    return (
        Event(issue, pack_us, lane, comm_us, job, takes=packed + reduced, gives=fresh),
        Event(wait, unpack_us, job=job, gives=packed + dropped),
    )


def all_reduce_events(
    problem: Problem, bucket: Bucket, micro: MicroStep
) -> tuple[Event, Event] | None:
    """Issue and wait of the all-reduce that follows a reduction; None where there are no replicas.

    The collective itself takes no memory: gloo's and NCCL's work in place.
    """
    if not _is_replicated(problem, bucket):
        return None
    first, grads = problem.groups[bucket.groups[0]], _grads(problem, bucket)
    kinds = (StepKind.ALL_REDUCE_ISSUE, StepKind.ALL_REDUCE_WAIT)
    issue, wait = (_step(problem, bucket, kind) for kind in kinds)
    if not (micro.last or problem.sync_each):
        return Event(issue), Event(wait)
    assert first.all_reduce_lane is not None
    found = [g.all_reduce for _, g in grads if g.all_reduce is not None]
    lane, job = first.all_reduce_lane, _job(problem, bucket, 2)
    own = problem.lanes[lane]
    comm_us = transfer_us([transfer.us for transfer in found], own.launch_us)
    after = _job(problem, bucket, 1) if first.world_size > 1 else -1
    unpack_us = sum(transfer.after_us for transfer in found) + own.wait_us
    gives = _dropped(problem, grads, micro)
    return (
        Event(issue, own.issue_us, lane, comm_us, job, after=after),
        Event(wait, unpack_us, job=job, gives=gives),
    )


def _grads(problem: Problem, bucket: Bucket) -> list[tuple[int, Gradient]]:
    """With their groups."""
    return [(g.id, p.gradient) for g, p in parts_of(problem, bucket) if p.gradient is not None]


def _is_replicated(problem: Problem, bucket: Bucket) -> bool:
    return problem.groups[bucket.groups[0]].all_reduce_lane is not None


def _reduced(grads: Sequence[tuple[int, Gradient]]) -> tuple[Allocation, ...]:
    return tuple(
        Allocation(Category.SHARDED_GRAD, g.output_bytes + g.staged_bytes, n) for n, g in grads
    )


def _dropped(
    problem: Problem, grads: Sequence[tuple[int, Gradient]], micro: MicroStep
) -> tuple[Allocation, ...]:
    """What is not needed when a reduced gradient has been handed over."""
    if problem.has_gradients or (problem.sync_each and not micro.first):  # it was added
        return _reduced(grads)
    staged = ((n, g.staged_bytes) for n, g in grads if g.staged_bytes)
    return tuple(Allocation(Category.SHARDED_GRAD, size, n) for n, size in staged)


# -- copies to the host and back ------------------------------------------------------------------


def offload_events(problem: Problem, offload: Offload) -> tuple[Event, Event]:
    """Issue and wait of a copy to the host: until then it holds what it copies."""
    return _copy_events(problem, offload, StepKind.OFFLOAD_ISSUE)


def reload_events(problem: Problem, offload: Offload) -> tuple[Event, Event]:
    """Issue and wait of the copy back. At the wait what reads the activations has them."""
    return _copy_events(problem, offload, StepKind.RELOAD_ISSUE)


def _copy_events(problem: Problem, offload: Offload, issue: StepKind) -> tuple[Event, Event]:
    host, copied = problem.host, (Allocation(Category.ACTIVATION, offload.bytes, offload.group),)
    assert host is not None
    lane = host.out_lane if issue is StepKind.OFFLOAD_ISSUE else host.back_lane
    job = FIRST_COPY + offload.group
    return (
        Event(Step(issue, offload.group), 0.0, lane, offload.us, job, takes=copied),
        Event(Step(WAIT_OF[issue], offload.group), job=job, gives=copied),
    )


def _step(problem: Problem, bucket: Bucket, kind: StepKind) -> Step:
    parts = problem.groups[bucket.groups[0]].parts
    params = tuple(place for index in bucket.parts for place in parts[index].params)
    return Step(kind, bucket.groups[0], with_groups=bucket.groups[1:], params=params)


def _job(problem: Problem, bucket: Bucket, stream: int) -> int:
    """A number of its own for each collective of a direction."""
    part = bucket.parts[0] if bucket.parts else 0
    return 3 * (bucket.groups[0] + part * len(problem.groups)) + stream
