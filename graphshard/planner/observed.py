"""A problem after it was measured: every cost that was seen takes the place of its prediction.

What was not seen (the gather of a group that was still gathered, say) moves by the median ratio of
its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean, median

from graphshard.planner.activations import Offload
from graphshard.planner.checked import checked
from graphshard.planner.problem import (
    Group,
    Part,
    Problem,
    Region,
    Transfer,
    gather_of,
    transfers_of,
)
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Direction, Step, StepKind
from graphshard.schedule.steps import COLLECTIVES, ISSUE_OF


@dataclass(frozen=True, slots=True)
class Key:
    """Part `part` of group `group` in one collective of a direction; `on_node`: see `Step`."""

    direction: Direction
    kind: StepKind
    group: int
    part: int
    on_node: bool = False


Seen = Mapping[Key, tuple[Transfer, Transfer]]  # predicted, measured


def observed(problem: Problem, measured: Measured) -> Problem:
    """`problem` with the costs of `measured`, whose regions have to be the problem's.

    Raises ValueError if they are not, PlanError (GS602) if the result contradicts itself.
    """
    seen = {
        key: transfers
        for direction in problem.directions
        for key, transfers in _seen(problem, direction, measured.of(direction))
    }
    groups = tuple(
        replace(g, parts=tuple(_part(g, place, part, seen) for place, part in enumerate(g.parts)))
        for g in problem.groups
    )
    forward = _regions(problem.forward, measured.forward)
    backward = _regions(problem.backward, measured.backward)
    # What an issue and a wait took is with their copies now.
    lanes = tuple(
        replace(
            lane,
            launch_us=min(lane.launch_us, *_times_on(groups, index)),
            issue_us=0.0,
            wait_us=0.0,
        )
        for index, lane in enumerate(problem.lanes)
    )
    offloads = _offloads(problem.offloads, (*measured.forward, *measured.backward))
    return checked(
        replace(
            problem,
            groups=groups,
            lanes=lanes,
            forward=forward,
            backward=backward,
            offloads=offloads,
        )
    )


def _offloads(offloads: Sequence[Offload], segments: Sequence[Segment]) -> tuple[Offload, ...]:
    """Each way takes the mean of what both took; what was not seen moves as the others did."""
    seen: dict[int, list[float]] = {}
    for segment in segments:
        step, us = segment.step, segment.comm_us
        if step.is_copy and step.group is not None and us is not None:
            seen.setdefault(step.group, []).append(us)
    times = {group: mean(each) for group, each in seen.items()}
    ratios = [times[o.group] / o.us for o in offloads if o.group in times and o.us > 0]
    usual = median(ratios or [1.0])
    return tuple(replace(o, us=times.get(o.group, usual * o.us)) for o in offloads)


def _times_on(groups: Sequence[Group], lane: int) -> list[float]:
    """Of all collectives on `lane`; a launch is a part of each of them."""
    parts = ((group, part) for group in groups for part in group.parts)
    transfers = chain.from_iterable(transfers_of(*pair) for pair in parts)
    return [transfer.us for own, transfer in transfers if own == lane] or [float("inf")]


def _regions(regions: Sequence[Region], segments: Sequence[Segment]) -> tuple[Region, ...]:
    compute = [s for s in segments if s.step.kind is StepKind.COMPUTE]
    pairs = zip(regions, compute, strict=True)
    return tuple(replace(region, us=segment.us) for region, segment in pairs)


def _part(group: Group, place: int, part: Part, seen: Seen) -> Part:
    def moved(
        transfer: Transfer, direction: Direction, kind: StepKind, *, on_node: bool = False
    ) -> Transfer:
        key = Key(direction, kind, group.id, place, on_node)
        return seen[key][1] if key in seen else _as_usual(transfer, key, seen)

    gradient, backward, node_gather = part.gradient, Direction.BACKWARD, part.node_gather
    if node_gather is not None:
        node_gather = moved(node_gather, backward, StepKind.GATHER_ISSUE, on_node=True)
    if gradient is not None:
        reduce = moved(gradient.reduce, backward, StepKind.REDUCE_ISSUE)
        all_reduce = gradient.all_reduce
        if all_reduce is not None:
            all_reduce = moved(all_reduce, backward, StepKind.ALL_REDUCE_ISSUE)
        gradient = replace(gradient, reduce=reduce, all_reduce=all_reduce)
    return replace(
        part,
        gather=moved(part.gather, Direction.FORWARD, StepKind.GATHER_ISSUE),
        regather=moved(gather_of(part, backward), backward, StepKind.GATHER_ISSUE),
        node_gather=node_gather,
        gradient=gradient,
    )


def _as_usual(transfer: Transfer, key: Key, seen: Seen) -> Transfer:
    """`transfer`, off by as much as the median of its kind, over links of its kind."""
    alike = [
        (_times(before), _times(after))
        for other, (before, after) in seen.items()
        if (other.kind, other.on_node) == (key.kind, key.on_node)
    ]
    factors = [
        median([after[i] / before[i] for before, after in alike if before[i] > 0] or [1.0])
        for i in range(3)
    ]
    return _with_times(transfer, *(t * f for t, f in zip(_times(transfer), factors, strict=True)))


def _times(transfer: Transfer) -> tuple[float, float, float]:
    return transfer.us, transfer.before_us, transfer.after_us


def _with_times(transfer: Transfer, us: float, before_us: float, after_us: float) -> Transfer:
    """What is in place makes no copies, so nothing is learnt of what these cost FSDP2."""
    if transfer.in_place:
        return replace(transfer, us=us)
    return Transfer(us, before_us, after_us)


def _seen(
    problem: Problem, direction: Direction, segments: Sequence[Segment]
) -> Iterator[tuple[Key, tuple[Transfer, Transfer]]]:
    """Each part that travelled in a measured collective: predicted and measured transfer."""
    waits = {s.step.identity: s.us for s in segments if s.step.kind in ISSUE_OF}
    for segment in segments:
        step, comm_us = segment.step, segment.comm_us
        if step.kind not in COLLECTIVES or comm_us is None:
            continue
        unpack_us = waits[step.identity]
        rows = list(travelling(problem, direction, segment.step))
        lane = problem.groups[rows[0][0].group].lane_of(step, direction)
        comm_us += problem.lanes[lane].launch_us * (len(rows) - 1)
        own = [predicted for _, predicted in rows]
        columns = (
            _shares(comm_us, [t.us for t in own]),
            _shares(segment.us, [t.before_us for t in own]),
            _shares(unpack_us, [t.after_us for t in own]),
        )
        for (key, predicted), *times in zip(rows, *columns, strict=True):
            yield key, (predicted, _with_times(predicted, *times))


def travelling(
    problem: Problem, direction: Direction, step: Step
) -> Iterator[tuple[Key, Transfer]]:
    """The parts in the collective that `step` issues, with their predicted transfers."""
    for number in step.groups:
        for place, part in enumerate(problem.groups[number].parts):
            if step.params and part.params[0] not in step.params:
                continue
            key = Key(direction, step.kind, number, place, step.on_node)
            if step.kind is StepKind.GATHER_ISSUE:
                yield key, gather_of(part, direction, on_node=step.on_node)
            elif part.gradient is not None and step.kind is StepKind.REDUCE_ISSUE:
                yield key, part.gradient.reduce
            elif part.gradient is not None and part.gradient.all_reduce is not None:
                yield key, part.gradient.all_reduce


def _shares(total: float, weights: Sequence[float]) -> list[float]:
    """`total` in proportion to `weights`, in equal parts if they are all zero."""
    whole = sum(weights)
    if whole == 0:
        return [total / len(weights)] * len(weights)
    return [total * weight / whole for weight in weights]
