"""From a placed program to a priced problem: all that the planner knows, as plain numbers.

In come the forward and backward graphs with their communication placed naively, what FSDP2's
settings say of each group, and a machine. Out comes a `Problem`: regions with times and bytes
alive, and per group its transfers, uses and gradients. Nothing here measures or communicates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from graphshard.cost.comm import Collective
from graphshard.cost.comm import Group as Ranks
from graphshard.cost.flops import graph_work
from graphshard.cost.live import Live, live_bytes, saved_memory
from graphshard.cost.machine import Machine, collective_us, launch_us
from graphshard.cost.memory import ITEM_BYTES
from graphshard.cost.roofline import copy_us, ends_us
from graphshard.fsdp2.settings import GroupSettings
from graphshard.ir import Program
from graphshard.plan import Direction, GroupInfo
from graphshard.planner.outline import Outline
from graphshard.planner.problem import (
    Category,
    Claim,
    Gradient,
    Group,
    Lane,
    Part,
    Problem,
    Recompute,
    Region,
    Transfer,
    Use,
    checked,
)
from graphshard.recompute import Unit, units

# A long stretch of compute is cut into so many regions, so that a gather can start inside it.
CUTS = 8


def price(
    program: Program,
    outlines: dict[Direction, Outline],
    settings: Sequence[GroupSettings],
    machine: Machine,
    budget_bytes: int | None = None,
    *,
    recompute: bool = False,
) -> Problem:
    """The problem that `program` poses on `machine`. Raises PlanError if it contradicts itself.

    recompute: activations may be computed again; the options are those of `recompute_units`.
    """
    lanes = tuple(dict.fromkeys(n for s in settings for n in (s.gather_lane, s.reduce_lane)))
    stages = {
        direction: _stage(module.graph, outlines[direction], machine, _live(program, direction))
        for direction, module in _modules(program)
    }
    groups = tuple(
        _group(info, settings[info.id], stages, lanes, machine) for info in program.groups
    )
    return checked(
        Problem(
            groups=groups,
            lanes=tuple(Lane(name, _launch(name, settings, machine)) for name in lanes),
            forward=stages[Direction.FORWARD].regions,
            backward=stages[Direction.BACKWARD].regions if Direction.BACKWARD in stages else (),
            resident=tuple(_resident(settings)),
            recompute=tuple(_recompute(program, outlines, stages, machine)) if recompute else (),
            regroup_gathers=False,
            budget_bytes=budget_bytes,
        )
    )


def recompute_units(
    program: Program, outlines: dict[Direction, Outline], machine: Machine
) -> tuple[Unit, ...]:
    """What backward could compute again, in the order of the problem's options."""
    if program.forward is None or program.backward is None:
        return ()
    ends = _ends(program.forward.graph, machine)
    return units(program, outlines[Direction.FORWARD], ends)


def _recompute(
    program: Program,
    outlines: dict[Direction, Outline],
    stages: dict[Direction, _Stage],
    machine: Machine,
) -> Iterator[Recompute]:
    for unit in recompute_units(program, outlines, machine):
        yield Recompute(
            name=program.groups[unit.group].fqn,
            after=stages[Direction.FORWARD].region_of(unit.after),
            before=stages[Direction.BACKWARD].region_of(unit.before),
            saved_bytes=unit.saved_bytes,
            extra_us=unit.extra_us,
        )


def _ends(graph: fx.Graph, machine: Machine) -> tuple[float, ...]:
    """When each op ends if all run one after the other, from 0."""
    return (0.0, *map(float, ends_us(machine.processor, graph_work(graph))))


def _modules(program: Program) -> Iterator[tuple[Direction, fx.GraphModule]]:
    for direction, module in (
        (Direction.FORWARD, program.forward),
        (Direction.BACKWARD, program.backward),
    ):
        if module is not None:
            yield direction, module


# -- regions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stage:
    """One direction in regions. starts: the first op of each region, then the number of ops."""

    outline: Outline
    starts: tuple[int, ...]
    regions: tuple[Region, ...]

    def region_of(self, op: int) -> int:
        """The region of compute op `op`; -1 for -1 (before the first op)."""
        return bisect_right(self.starts[:-1], op) - 1


def _live(program: Program, direction: Direction) -> tuple[Live, ...]:
    assert program.forward is not None
    if direction is Direction.FORWARD:
        return live_bytes(program.forward.graph, frees_inputs=False)
    assert program.backward is not None
    saved = saved_memory(program.forward.graph)
    return live_bytes(program.backward.graph, frees_inputs=True, inputs=saved)


def _stage(graph: fx.Graph, outline: Outline, machine: Machine, live: Sequence[Live]) -> _Stage:
    ends = _ends(graph, machine)
    starts = _starts(outline, ends)
    regions = tuple(
        Region(
            us=ends[stop] - ends[start],
            activation_bytes=max(one.inputs + one.made for one in live[start:stop]),
            num_ops=stop - start,
        )
        for start, stop in pairwise(starts)
    )
    return _Stage(outline, starts, regions)


def _starts(outline: Outline, ends: Sequence[float]) -> tuple[int, ...]:
    """Where regions start: where a group is needed, released or reduced, and inside long ones."""
    last = {u.last + 1 for u in outline.uses if u.last is not None}
    ready = {r.after + 1 for r in outline.reductions}
    cuts = sorted({0, outline.num_ops, *(u.first for u in outline.uses), *last, *ready})
    longest_us = ends[-1] / (CUTS * max(1, len(outline.uses)))
    found = []
    for start, stop in pairwise(cuts):
        found.append(start)
        for op in range(start + 1, stop):
            if ends[op] - ends[found[-1]] >= longest_us:
                found.append(op)
    return (*found, outline.num_ops)


# -- groups --------------------------------------------------------------------------------------


def _group(
    info: GroupInfo,
    own: GroupSettings,
    stages: dict[Direction, _Stage],
    lanes: Sequence[str],
    machine: Machine,
) -> Group:
    ranks = Ranks(own.ranks, own.ranks_per_node, own.gather_lane)
    gather = Transfer(
        us=float(collective_us(machine, Collective.ALL_GATHER, ranks, info.gathered_bytes)),
        pack_us=float(copy_us(machine.processor, info.gathered_bytes / own.ranks)),
        unpack_us=float(copy_us(machine.processor, info.gathered_bytes)),
    )
    uses = {d: _use(stage, info.id) for d, stage in stages.items()}
    part = Part(
        gathered_bytes=info.gathered_bytes,
        gather=gather,
        forward=uses[Direction.FORWARD],
        backward=uses.get(Direction.BACKWARD),
        gradient=_gradient(info, own, stages, machine),
    )
    return Group(
        id=info.id,
        fqn=info.fqn,
        parts=(part,),
        gather_lane=lanes.index(own.gather_lane),
        reduce_lane=lanes.index(own.reduce_lane),
        world_size=own.ranks,
        reshard=own.reshard,
        is_root=own.is_root,
        forward_prefetch=own.forward_prefetch,
        backward_prefetch=own.backward_prefetch,
    )


def _use(stage: _Stage, group: int) -> Use | None:
    for use in stage.outline.uses:
        if use.group == group:
            last = None if use.last is None else stage.region_of(max(use.first, use.last))
            return Use(stage.region_of(use.first), last)
    return None


def _gradient(
    info: GroupInfo, own: GroupSettings, stages: dict[Direction, _Stage], machine: Machine
) -> Gradient | None:
    stage = stages.get(Direction.BACKWARD)
    if stage is None:
        return None
    ready = next((r for r in stage.outline.reductions if r.group == info.id), None)
    if ready is None:
        return None
    trainable = [p for p in info.params if p.trainable]
    grad_bytes = sum(p.gathered_bytes for p in trainable)
    numel = sum(p.gathered_bytes // ITEM_BYTES[p.dtype] for p in trainable)
    input_bytes = numel * own.reduce_item_bytes
    ranks = Ranks(own.ranks, own.ranks_per_node, own.reduce_lane)
    reduce = Transfer(
        us=float(collective_us(machine, Collective.REDUCE_SCATTER, ranks, input_bytes)),
        pack_us=float(copy_us(machine.processor, input_bytes)),
        unpack_us=float(copy_us(machine.processor, input_bytes / own.ranks)),
    )
    return Gradient(
        first=stage.region_of(ready.first),
        ready=stage.region_of(ready.after),
        bytes=grad_bytes,
        reduce=reduce,
        input_bytes=input_bytes,
        output_bytes=input_bytes // own.ranks,
    )


def _launch(name: str, settings: Sequence[GroupSettings], machine: Machine) -> float:
    own = next(s for s in settings if name in (s.gather_lane, s.reduce_lane))
    ranks = Ranks(own.ranks, own.ranks_per_node, name)
    return float(launch_us(machine, Collective.ALL_GATHER, ranks, 2**20))


def _resident(settings: Sequence[GroupSettings]) -> Iterator[Claim]:
    for number, own in enumerate(settings):
        yield Claim(Category.SHARDED_PARAM, own.shard_bytes, number)
        yield Claim(Category.OPT_STATE, own.optimizer_bytes, number)
