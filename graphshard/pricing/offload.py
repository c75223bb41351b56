"""What the host could hold from forward to backward, and what it does.

In: a placed program, and the units that could be computed again (`graphshard.pricing.recompute`):
what one of these frees may be offloaded instead. Out: options of a problem, with the lanes that
their copies go over; and, of a program with copies in it, when these have what they copy and when
what they bring back is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from graphshard.cost.machine import HostCopies, Machine, host_copy_us
from graphshard.fsdp2.settings import GroupSettings
from graphshard.graph.program import Program, compute_nodes, copied_tensors, steps
from graphshard.planner.activations import HostLink, Offload, OffloadOption
from graphshard.planner.checked import checked
from graphshard.planner.problem import CollectiveLane, Problem, Transfer
from graphshard.pricing.liveness import tensor_bytes
from graphshard.pricing.recompute import RecomputeUnit, activation_of, regions_of
from graphshard.schedule.plan import GroupInfo, StepKind

# Of what its group offers: less is not worth a copy of its own.
LEAST_SHARE = 0.01


def shard_host(own: GroupSettings, machine: Machine) -> HostCopies | None:
    """Where the host has the shards, how they come and their gradients go: else None."""
    return machine.host if own.offloads_to_cpu else None


def slower_by(whole: Transfer, host: HostCopies | None, size_bytes: int) -> Transfer:
    """`whole`, with a copy of this rank's `size_bytes` from or to the host: one after the other, as
    if the network were busy meanwhile."""
    if host is None:
        return whole
    return replace(whole, us=whole.us + float(host_copy_us(host, size_bytes)))


@dataclass(frozen=True, slots=True)
class OffloadUse:
    """`size_bytes` of activations of `group` are there after forward op `after`, and read from
    backward op `before` on; in between the host holds them."""

    group: int
    after: int
    before: int
    size_bytes: int


def offload_uses(program: Program) -> tuple[OffloadUse, ...]:
    """The copies in `program`, which has its steps placed naively."""
    if program.forward is None or program.backward is None:
        return ()
    before = _ops_before(program.backward.graph)
    needed = {s.group: before[w] for w, s in steps(program.backward.graph, StepKind.RELOAD_WAIT)}
    before = _ops_before(program.forward.graph)
    return tuple(
        OffloadUse(
            step.group,
            before[issue] - 1,
            needed[step.group],
            sum(map(tensor_bytes, copied_tensors(issue))),
        )
        for issue, step in steps(program.forward.graph, StepKind.OFFLOAD_ISSUE)
    )


def _ops_before(graph: fx.Graph) -> dict[fx.Node, int]:
    ops = set(compute_nodes(graph))
    counts = accumulate((node in ops for node in graph.nodes), initial=0)
    return dict(zip(graph.nodes, counts, strict=False))


def with_host(
    problem: Problem, uses: Sequence[OffloadUse], host: HostCopies | None, limit_bytes: int | None
) -> Problem:
    """`problem` with the lanes of copies, and those that its graph makes. limit_bytes: what this
    rank may have the host hold."""
    if host is None:
        return problem
    regions = regions_of(problem)
    count, launch_us = len(problem.lanes), host.curve.base_us
    copies = (CollectiveLane(name, launch_us) for name in ("offload", "reload"))
    offloads = (
        _offload(use.group, regions(use.after, use.before), use.size_bytes, host) for use in uses
    )
    link = HostLink(count, count + 1, launch_us, limit_bytes)
    lanes = (*problem.lanes, *copies)
    return checked(replace(problem, lanes=lanes, host=link, offloads=tuple(offloads)))


def offloadable(
    problem: Problem,
    groups: Sequence[GroupInfo],
    units: Sequence[RecomputeUnit],
    host: HostCopies,
) -> Problem:
    """`problem` with what `units` free as options to offload."""
    regions = regions_of(problem)
    whole: dict[int, int] = {}
    for unit in units:
        whole[unit.group] = whole.get(unit.group, 0) + unit.held_bytes
    options = tuple(
        OffloadOption(
            activation_of(unit, groups),
            _offload(unit.group, regions(unit.after, unit.before), unit.held_bytes, host),
        )
        for unit in units
        if unit.held_bytes > LEAST_SHARE * whole[unit.group]
    )
    return checked(replace(problem, offload_options=options))


def _offload(group: int, regions: tuple[int, int], size_bytes: int, host: HostCopies) -> Offload:
    return Offload(group, *regions, size_bytes, float(host_copy_us(host, size_bytes)))
