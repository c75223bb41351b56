"""What the CUDA caching allocator keeps reserved while FSDP2 trains, steps and optimizer together.

In: FSDP2's schedule of a step, what its collectives hold, and the lifetimes of all tensors. Out:
bytes, to compare with the peak of `reserved_bytes.all` in `torch.cuda.memory_stats`. More is
reserved than is ever in use at once: streams do not share blocks, and what the first optimizer
step keeps (its states) lies in what activations have left, so that these take new memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphshard.cost.allocator import Allocator, Block
from graphshard.planner.problem import Category, Gradient, Problem
from graphshard.pricing.lifetimes import At, Lifetime
from graphshard.schedule.plan import Direction, GroupInfo, Schedule, Step, StepKind

# FSDP2 asks for what it gathers in its all-gather copy-in stream, and for sharded gradients in its
# reduce-scatter stream (torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
COMPUTE, COPY_IN, REDUCE = range(3)
# The first one has no optimizer states; in the second they are where activations had been.
ITERATIONS = 3


@dataclass(slots=True)
class _Training:
    """One rank's memory. held: by what it is for."""

    problem: Problem
    groups: Sequence[GroupInfo]
    lifetimes: Sequence[Lifetime]
    allocator: Allocator
    held: dict[object, list[Block]] = field(default_factory=lambda: defaultdict(list))
    made: dict[At, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[At, list[int]] = field(default_factory=lambda: defaultdict(list))

    def take(self, key: object, sizes: Iterable[int], stream: int = COMPUTE) -> None:
        self.held[key] += [self.allocator.allocate(size, stream) for size in sizes if size]

    def give(self, key: object) -> None:
        for block in self.held.pop(key, ()):
            self.allocator.free(block)


def reserved_bytes(
    schedules: Sequence[Schedule],
    problem: Problem,
    groups: Sequence[GroupInfo],
    lifetimes: Sequence[Lifetime],
    capacity_bytes: int | None = None,
) -> int:
    """The peak over several steps. schedules: of FSDP2's own order, forward and backward.
    capacity_bytes: of the device; None: without a limit."""
    training = _Training(problem, groups, lifetimes, Allocator(capacity_bytes))
    for number, lifetime in enumerate(lifetimes):
        training.made[lifetime.born].append(number)
        training.ended[lifetime.last].append(number)
    shards = [size for group in groups for size in _shards(problem, group)]
    training.take(Category.SHARDED_PARAM, shards)
    for iteration in range(ITERATIONS):
        for schedule in schedules:
            for step in schedule.steps:
                _run(training, schedule.direction, step)
        for key in (Category.ALL_GATHER, Category.REDUCE_SCATTER, Category.UNSHARDED_GRAD):
            training.give(key)
        _optimize(training, shards, is_first=iteration == 0)
    return training.allocator.peak_bytes


def _shards(problem: Problem, group: GroupInfo) -> list[int]:
    """This rank's part of each parameter, as stored."""
    whole = sum(
        a.bytes
        for a in problem.resident
        if a.group == group.id and a.category is Category.SHARDED_PARAM
    )
    numel = max(1, sum(param.numel for param in group.params))
    return [whole * param.numel // numel for param in group.params]


def _optimize(training: _Training, shards: Sequence[int], *, is_first: bool) -> None:
    """AdamW of torch.optim (foreach): two states of each shard, and for a moment the roots of all
    second ones. Then the gradients are dropped."""
    if is_first:
        for size in shards:
            training.take(Category.OPT_STATE, (size, size))
    training.take(Category.TEMP, shards)
    training.give(Category.TEMP)
    training.give(Category.SHARDED_GRAD)


def _run(training: _Training, direction: Direction, step: Step) -> None:
    if step.kind is StepKind.COMPUTE:
        for op in range(step.start, step.stop):
            _compute(training, At(direction, op))
    elif step.kind is StepKind.GATHER_ISSUE and not step.kept:
        sizes = [training.groups[number].gathered_bytes for number in step.groups]
        training.take(("flight", step.groups), sizes, COPY_IN)
    elif step.kind is StepKind.GATHER_WAIT and not step.kept:
        training.give(Category.ALL_GATHER)  # of the gather before
        for number in step.groups:
            params = training.groups[number].params
            training.take(number, [param.held_bytes for param in params])
        flight = training.held.pop(("flight", step.groups), [])
        training.held[Category.ALL_GATHER] += flight
    elif step.kind is StepKind.RELEASE and not step.kept:
        training.give(step.group)
    elif step.kind is StepKind.REDUCE_ISSUE:
        _reduce(training, step)


def _compute(training: _Training, at: At) -> None:
    for number in training.made.get(at, ()):
        training.take(("tensor", number), (training.lifetimes[number].size_bytes,))
    for number in training.ended.get(at, ()):
        key = "tensor", number
        if training.lifetimes[number].is_gradient:  # until it is packed
            training.held[Category.UNSHARDED_GRAD] += training.held.pop(key, ())
        else:
            training.give(key)


def _reduce(training: _Training, step: Step) -> None:
    """FSDP2 first drops the input of the reduction before, then packs."""
    training.give(Category.REDUCE_SCATTER)
    for number in step.groups:
        found = _gradients(training.problem, number)
        training.take(Category.REDUCE_SCATTER, [sum(g.input_bytes for g in found)])
        training.give(Category.UNSHARDED_GRAD)
        training.take(Category.SHARDED_GRAD, [sum(g.output_bytes for g in found)], REDUCE)


def _gradients(problem: Problem, number: int) -> list[Gradient]:
    parts = problem.groups[number].parts
    return [part.gradient for part in parts if part.gradient is not None]
