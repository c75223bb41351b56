"""What planning needs of a placed program, op by op, as plain numbers.

In: a program with its communication placed naively, and a machine. Out: a `GraphCosts`: per
direction the time of each compute op, the bytes alive during it, and the ops at which groups are
used and gradients come; and what backward could compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from torch import fx

from graphshard.cost.machine import Machine, work_us
from graphshard.cost.roofline import OpWork
from graphshard.graph.owners import maker
from graphshard.graph.program import Program, aliases, compute_nodes, positions, steps
from graphshard.pricing.flops import graph_work
from graphshard.pricing.fusion import UNFUSED, fusion_of, never_stored
from graphshard.pricing.held import HeldValue, held_values
from graphshard.pricing.lifetimes import Lifetime, lifetimes
from graphshard.pricing.liveness import Live, Memory, memories, saved_memory, summed
from graphshard.pricing.offload import OffloadUse, offload_uses
from graphshard.pricing.recompute import RecomputeUnit, units
from graphshard.pricing.region_cuts import aligned, crossing_bytes, late_params
from graphshard.pricing.usage import GradReady, GroupUse, ParamUse, Usage
from graphshard.schedule.plan import Direction, GroupInfo, StepKind


@dataclass(frozen=True, slots=True)
class OpCosts:
    """One direction. us, live: one entry per compute op. memories: what `live` counts; nothing of
    blocks that were not captured (`GraphCosts.lifetimes` has them)."""

    usage: Usage
    us: tuple[float, ...]
    live: tuple[Live, ...]
    memories: tuple[Memory, ...] = field(default=(), compare=False)

    @property
    def ends_us(self) -> tuple[float, ...]:
        """When each op ends if all run one after the other, from 0."""
        return tuple(accumulate(self.us, initial=0.0))


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """A program as the planner sees it. units: what backward could compute again. held: what is
    saved whatever is chosen of these; both empty where nobody asked. offloads: what it has the host
    hold. lifetimes: of all tensors."""

    name: str
    groups: tuple[GroupInfo, ...]
    by_direction: dict[Direction, OpCosts]
    units: tuple[RecomputeUnit, ...] = ()
    held: tuple[HeldValue, ...] = ()
    offloads: tuple[OffloadUse, ...] = ()
    lifetimes: tuple[Lifetime, ...] = ()


def graph_costs(
    program: Program,
    machine: Machine,
    *,
    recompute: bool,
    fused: bool = False,
    parts: bool = False,
) -> GraphCosts:
    """recompute: say also what backward could compute again. fused: price the ops between two
    communication points as a compiler would fuse them, not one by one. parts: groups may travel in
    parts. machine: its ranks per node are those of the job."""
    forward = _op_costs(program, Direction.FORWARD, machine, fused, inside=parts)
    by_direction = {Direction.FORWARD: forward}
    if program.backward is not None:
        late = late_params(forward.usage) if parts else {}
        by_direction[Direction.BACKWARD] = _op_costs(
            program, Direction.BACKWARD, machine, fused, late=late
        )
    found = units(program, forward.usage, forward.us) if recompute else ()
    left = held_values(program, found) if recompute else ()
    copies = offload_uses(program)
    last = by_direction.get(Direction.BACKWARD)
    tensors = lifetimes(forward.memories, last.memories if last is not None else ())
    return GraphCosts(program.name, program.groups, by_direction, found, left, copies, tensors)


def _op_costs(
    program: Program,
    direction: Direction,
    machine: Machine,
    fused: bool,
    *,
    inside: bool = False,
    late: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> OpCosts:
    """inside, late: see `graphshard.pricing.region_cuts.aligned`."""
    graph = program.by_direction[direction].graph
    found = usage_of(program, graph, direction)
    if fused:
        us = _us(machine, graph_work(graph, fused_regions=(0,)))
        inner = crossing_bytes(graph, never_stored(compute_nodes(graph), (0,)))
        found = aligned(found, crossing_bytes(graph), us, fused=inner, inside=inside, late=late)
    works = graph_work(graph, fused_regions=found.cuts if fused else None)
    us = _us(machine, works)
    tensors = _memories(program, direction, found.cuts if fused else None)
    return OpCosts(found, us, summed(tensors, found.num_ops), tensors)


def _us(machine: Machine, works: Iterable[OpWork]) -> tuple[float, ...]:
    return tuple(float(work_us(machine, work)) for work in works)


def _memories(
    program: Program, direction: Direction, fused_regions: Collection[int] | None
) -> tuple[Memory, ...]:
    """fused_regions: see `graph_work`."""
    assert program.forward is not None
    graph, is_forward = program.by_direction[direction].graph, direction is Direction.FORWARD
    saved = {} if is_forward else saved_memory(program.forward.graph)
    fusion = UNFUSED
    if fused_regions is not None:
        fusion = fusion_of(compute_nodes(graph), fused_regions)
    return memories(graph, frees_inputs=not is_forward, inputs=saved, fusion=fusion)


def usage_of(program: Program, graph: fx.Graph, direction: Direction) -> Usage:
    """What the planner may know of `graph`, which has its steps placed naively."""
    order = positions(graph)
    compute = compute_nodes(graph)
    # Position in graph order -> number of compute ops before it.
    before = {}
    ops = set(compute)
    count = 0
    for node in graph.nodes:
        before[order[node]] = count
        count += node in ops
    released = {step.group for _, step in steps(graph, StepKind.RELEASE)}
    uses, params = [], []
    for wait, step in steps(graph, StepKind.GATHER_WAIT):
        group, found = step.group, []
        for item in wait.users:
            readers = {u for n in aliases([item]) for u in (n, *n.users) if u in ops}
            reads = sorted(before[order[reader]] for reader in readers) or [before[order[wait]]]
            last = reads[-1] if group in released else None
            found.append(ParamUse(group, int(item.args[1]), reads[0], last))  # type: ignore[arg-type]
        lasts = [use.last for use in found if use.last is not None]
        uses.append(GroupUse(group, before[order[wait]], max(lasts, default=None)))
        params += found
    places = {node: place for place, node in enumerate(compute)}
    reductions = tuple(
        GradReady(
            step.group,
            before[order[issue]] - 1,
            comes=_each(issue, lambda grad: before[order[grad]]),
            made=_each(issue, lambda grad: places.get(maker(grad), -1)),
        )
        for issue, step in steps(graph, StepKind.REDUCE_ISSUE)
        if issue.all_input_nodes[1:]
    )
    return Usage(direction, len(compute), tuple(uses), reductions, _kept(program), tuple(params))


def _each(issue: fx.Node, op_of: Callable[[fx.Node], int]) -> tuple[tuple[int, int], ...]:
    """The parameters that `issue` reduces, with `op_of` their gradients."""
    _, grads, indices = issue.args
    pairs = zip(indices, grads, strict=True)  # type: ignore[arg-type]
    return tuple((int(i), op_of(g)) for i, g in pairs)


def _kept(program: Program) -> frozenset[int]:
    """Groups that FSDP2's settings keep gathered until backward, if backward needs them."""
    if program.backward is None:
        return frozenset()
    needed = {step.group for _, step in steps(program.backward.graph, StepKind.GATHER_WAIT)}
    return frozenset(g.id for g in program.groups if not g.reshard_after_forward and g.id in needed)
