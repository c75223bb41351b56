"""A step time that no schedule beats: nothing that is open is assumed to be against it.

For each direction the bound is the longest of: compute alone; each lane alone, with the compute
that has to come before and after it (the one-machine bound of Carlier, "The one-machine
sequencing problem", EJOR 11, 1982); the critical path of the dependency DAG. Directions follow
each other and no collective is in flight between them, so their bounds add up. A gather that may
be saved (kept open, or between micro-steps) counts nothing, a launch that a merge may save
counts once a lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

from graphshard.planner.events import MicroStep, micro_steps_of
from graphshard.planner.fsdp2 import keeps
from graphshard.planner.problem import Group, Problem, gather_of, use_of
from graphshard.schedule.plan import Direction


@dataclass(frozen=True, slots=True)
class Need:
    """A collective that has to run on `lane`.

    pack_us, unpack_us: copies on compute. after, before: the regions it comes between.
    first: what it follows (an all-reduce its reduction).
    """

    lane: int
    group: int
    us: float
    pack_us: float
    unpack_us: float
    after: int
    before: int
    first: Need | None = None

    @property
    def lead_us(self) -> float:
        """At least from the end of region `after` until it may start."""
        before_us = 0.0 if self.first is None else self.first.lead_us + self.first.us
        return before_us + self.pack_us


def lower_bound_us(problem: Problem) -> float:
    """Microseconds of a whole step (all micro-steps) that no schedule of `problem` beats."""
    return sum(
        times * max(_bounds(problem, direction, micro))
        for micro, times in micro_steps_of(problem)
        for direction in problem.directions
    )


def _bounds(problem: Problem, direction: Direction, micro: MicroStep) -> Iterator[float]:
    needs = [*_gathers(problem, direction, micro)]
    if direction is Direction.BACKWARD and (micro.last or problem.sync_each):
        needs += _reductions(problem)
    done = list(accumulate((r.us for r in problem.regions(direction)), initial=0.0))
    yield done[-1] + sum(n.pack_us + n.unpack_us for n in needs)
    by_lane: dict[int, list[Need]] = defaultdict(list)
    for need in needs:
        if problem.groups[need.group].world_size > 1 or need.first is not None:
            by_lane[need.lane].append(need)
    for lane in sorted(by_lane):
        yield from _lane_bounds(problem, by_lane[lane], done)
    yield _critical_path(problem, direction, needs)


def _gathers(problem: Problem, direction: Direction, micro: MicroStep) -> Iterator[Need]:
    """The gathers that no choice can avoid."""
    for group in problem.groups:
        use = group.use_in(direction)
        if use is None or _may_be_there(problem, group, direction, micro):
            continue
        for part in group.parts:
            own, transfer = use_of(part, direction) or use, gather_of(part, direction)
            lane = group.lane_in(direction)
            us = transfer.us if group.world_size > 1 else 0.0
            unpack_us = transfer.after_us if group.world_size > 1 else 0.0
            yield Need(lane, group.id, us, transfer.before_us, unpack_us, -1, own.first)


def _may_be_there(problem: Problem, group: Group, direction: Direction, micro: MicroStep) -> bool:
    """Some choice of the planner finds the group gathered already."""
    both = all(group.use_in(d) is not None for d in Direction) and group.post_forward is None
    if direction is Direction.BACKWARD:
        return both and (group.reshard is not True or keeps(problem, group.id))
    return both and not micro.first and group.keep_across is not False


def _reductions(problem: Problem) -> Iterator[Need]:
    for group in problem.groups:
        for grad in (p.gradient for p in group.parts if p.gradient is not None):
            copies, us = grad.reduce, grad.reduce.us if group.world_size > 1 else 0.0
            end = len(problem.backward)
            reduce = Need(
                group.reduce_lane, group.id, us, copies.before_us, copies.after_us, grad.ready, end
            )
            yield reduce
            if grad.all_reduce is not None and group.all_reduce_lane is not None:
                us, after_us = grad.all_reduce.us, grad.all_reduce.after_us
                lane = group.all_reduce_lane
                yield Need(lane, group.id, us, 0.0, after_us, grad.ready, end, reduce)


def _lane_bounds(problem: Problem, needs: list[Need], done: list[float]) -> Iterator[float]:
    """All that starts no earlier than some need, and all that ends no earlier than some need."""
    early = {id(n): done[n.after + 1] + n.lead_us for n in needs}
    late = {id(n): n.unpack_us + done[-1] - done[min(n.before, len(done) - 1)] for n in needs}
    for key in (early, late):
        other = late if key is early else early
        chosen: list[Need] = []
        busy_us, least, groups = 0.0, float("inf"), set[int]()
        for need in sorted(needs, key=lambda n: -key[id(n)]):
            chosen.append(need)
            launch_us = problem.lanes[need.lane].launch_us
            # A launch is saved once for each part that may travel with another one.
            fresh = not groups or (need.group not in groups and not _may_merge(problem))
            busy_us += need.us if fresh else need.us - launch_us
            groups.add(need.group)
            least = min(least, other[id(need)])
            yield key[id(need)] + busy_us + least


def _may_merge(problem: Problem) -> bool:
    return problem.regroup_gathers or problem.regroup_reductions or problem.split_reductions


def _critical_path(problem: Problem, direction: Direction, needs: Iterable[Need]) -> float:
    """gather -> first use -> ... -> gradient ready -> reduction, in microseconds."""
    graph: nx.DiGraph = nx.DiGraph()
    regions = problem.regions(direction)
    graph.add_edge("start", 0, us=0.0)
    graph.add_edge(len(regions), "end", us=0.0)
    for index, region in enumerate(regions):
        graph.add_edge(index, index + 1, us=region.us)
    for number, need in enumerate(needs):
        source = "start" if need.after < 0 else need.after + 1
        graph.add_edge(source, ("packed", number), us=need.lead_us)
        graph.add_edge(("packed", number), ("there", number), us=need.us)
        sink = need.before if need.after < 0 and need.before < len(regions) else "end"
        graph.add_edge(("there", number), sink, us=need.unpack_us)
    return float(nx.dag_longest_path_length(graph, weight="us"))
