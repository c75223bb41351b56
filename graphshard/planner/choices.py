"""What the planner may choose apart from positions, and the buckets that follow from it.

`Choices` says which groups stay gathered, what is recomputed, and how the three streams of
collectives (gathers of forward, gathers of backward, reductions) are cut into buckets. Where each
collective is issued and waited for is a `Placement` (graphshard.planner.placement).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.planner.activations import Offload, in_one_copy
from graphshard.planner.memo import Memo, once
from graphshard.planner.problem import Group, Part, Problem, use_of
from graphshard.schedule.plan import Direction, Schedule, StepKind


@dataclass(frozen=True, slots=True)
class Cuts:
    """Departures from one bucket per group.

    joined: groups that travel with the group before them in the stream. split: groups whose parts
    travel one by one. Both in rising order; what cannot be joined or split stays as it is.
    """

    joined: tuple[int, ...] = ()
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """kept: groups gathered from forward to backward. across: also between micro-steps. on_node:
    groups of which the ranks of each node hold a shard between forward and backward.

    recompute: indices of Problem.recompute that are taken. offload: of Problem.offload_options.
    delays: (first group of a reduction,
    regions that it waits for after its gradients are ready). All tuples in rising order.
    """

    kept: tuple[int, ...] = ()
    across: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    forward: Cuts = Cuts()
    backward: Cuts = Cuts()
    reduce: Cuts = Cuts()
    delays: tuple[tuple[int, int], ...] = ()
    on_node: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()

    def cuts_in(self, direction: Direction) -> Cuts:
        return self.forward if direction is Direction.FORWARD else self.backward


def choices_of(schedules: Sequence[Schedule], across: tuple[int, ...] = ()) -> Choices:
    """What schedules say: all but delays, and what is computed again or offloaded. across: the
    groups that stay gathered between micro-steps, which they do not say."""
    forward, *backward = schedules
    releases = [s for s in forward.of_kind(StepKind.RELEASE) if s.group is not None]
    return Choices(
        kept=tuple(sorted(s.groups[0] for s in releases if s.kept)),
        across=across,
        on_node=tuple(sorted(s.groups[0] for s in releases if s.on_node)),
        forward=_cuts_in([forward], StepKind.GATHER_ISSUE),
        backward=_cuts_in(backward, StepKind.GATHER_ISSUE),
        reduce=_cuts_in(backward, StepKind.REDUCE_ISSUE),
    )


def _cuts_in(schedules: Sequence[Schedule], issue: StepKind) -> Cuts:
    issues = [s for one in schedules for s in one.of_kind(issue) if not s.kept]
    joined = {group for step in issues for group in step.groups[1:]}
    split = {step.groups[0] for step in issues if step.params}
    return Cuts(tuple(sorted(joined)), tuple(sorted(split)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels in one collective: whole groups, or (`parts` given) some parts of one group."""

    groups: tuple[int, ...]
    parts: tuple[int, ...] = ()


def parts_of(problem: Problem, bucket: Bucket) -> Iterator[tuple[Group, Part]]:
    for number in bucket.groups:
        group = problem.groups[number]
        chosen = bucket.parts or range(len(group.parts))
        yield from ((group, group.parts[index]) for index in chosen)


def offloads_of(problem: Problem, choices: Choices) -> tuple[Offload, ...]:
    """All that the host holds: of each group at most one."""
    return (*problem.offloads, *offloads_taken(problem, choices))


def offloads_taken(problem: Problem, choices: Choices) -> tuple[Offload, ...]:
    if not choices.offload:
        return ()
    assert problem.host is not None
    taken = (problem.offload_options[index] for index in choices.offload)
    return tuple(in_one_copy(taken, problem.host.launch_us))


def gather_buckets(memo: Memo, choices: Choices, direction: Direction) -> list[Bucket]:
    """The all-gathers of one direction in order of first use; kept groups have none in backward."""
    problem = memo.problem
    kept = set(choices.kept) if direction is Direction.BACKWARD else set()
    used = [g for g in _by_first_use(memo, direction) if g.id not in kept]
    # Gathered in the first micro-step only, or from a smaller group of ranks.
    alone = {*choices.across, *(g.id for g in used if g.post_forward is not None)}
    if direction is Direction.BACKWARD:
        alone.update(choices.on_node)
    found = _cut(
        used,
        choices.cuts_in(direction) if problem.regroup_gathers else Cuts(),
        lambda g: g.lane_in(direction) if g.world_size > 1 and g.id not in alone else -1,
    )
    return sorted(found, key=lambda b: (first_use(memo, b, direction), b.groups, b.parts))


def _by_first_use(memo: Memo, direction: Direction) -> list[Group]:
    def order() -> list[Group]:
        used = [g for g in memo.problem.groups if g.use_in(direction) is not None]
        return sorted(used, key=lambda g: (first_use(memo, Bucket((g.id,)), direction), g.id))

    return once(memo, ("by first use", direction), order)


def reduce_buckets(memo: Memo, choices: Choices) -> list[Bucket]:
    """The reductions in the order in which their gradients are complete."""

    def order() -> list[Group]:
        trainable = [g for g in memo.problem.groups if any(p.gradient for p in g.parts)]
        return sorted(trainable, key=lambda g: (ready_after(memo, Bucket((g.id,))), g.id))

    problem = memo.problem
    found = _cut(
        once(memo, "by readiness", order),
        choices.reduce if problem.regroup_reductions or problem.split_reductions else Cuts(),
        lambda g: g.reduce_lane if g.world_size > 1 and g.all_reduce_lane is None else -1,
    )
    found = [b for b in found if any(p.gradient for _, p in parts_of(problem, b))]
    return sorted(found, key=lambda b: (ready_after(memo, b), b.groups, b.parts))


def _cut(groups: Iterable[Group], cuts: Cuts, lane_of: Callable[[Group], int]) -> list[Bucket]:
    """`groups` in order, one bucket each, but for `cuts`. Lane -1 takes part in no merge."""
    buckets: list[Bucket] = []
    joined, split, lane_before = set(cuts.joined), set(cuts.split), -1
    for group in groups:
        lane = lane_of(group)
        if group.id in split and len(group.parts) > 1 and lane >= 0:
            buckets.extend(Bucket((group.id,), (i,)) for i in range(len(group.parts)))
            lane_before = -1
            continue
        if group.id in joined and lane == lane_before >= 0:
            buckets[-1] = replace(buckets[-1], groups=(*buckets[-1].groups, group.id))
        else:
            buckets.append(Bucket((group.id,)))
        lane_before = lane
    return buckets


def first_use(memo: Memo, bucket: Bucket, direction: Direction) -> int:
    """The region before which `bucket` has to be gathered.

    A part that the direction does not read is due with the first that it does.
    """

    def first() -> int:
        uses = [use_of(part, direction) for _, part in parts_of(memo.problem, bucket)]
        firsts = [u.first for u in uses if u is not None]
        if firsts:
            return min(firsts)
        whole = memo.problem.groups[bucket.groups[0]].use_in(direction)
        assert whole is not None
        return whole.first

    return once(memo, ("first use", bucket, direction), first)


def ready_after(memo: Memo, bucket: Bucket) -> int:
    """The region after which all gradients of `bucket` are complete; -1: before the first."""

    def ready() -> int:
        grads = [p.gradient for _, p in parts_of(memo.problem, bucket)]
        return max((g.ready for g in grads if g is not None), default=-1)

    return once(memo, ("ready", bucket), ready)


def transfer_us(times_us: list[float], launch_us: float) -> float:
    """One collective instead of several: their sum, with one launch instead of one each."""
    return sum(times_us) - launch_us * (len(times_us) - 1)
