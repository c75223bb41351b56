"""What forward saves for backward and no plan can free.

In: a placed program and what of it could be computed again. Out: the other values, each with what
made it and whether the user's checkpoint policy asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.origins import origin_of
from graphshard.graph.owners import maker, owner
from graphshard.graph.program import Program, compute_nodes, step_of
from graphshard.pricing.liveness import WANTED, tensor_bytes
from graphshard.pricing.recompute import RecomputeUnit, returned
from graphshard.schedule.plan import Origin
from graphshard.schedule.shortage import Held


@dataclass(frozen=True, slots=True)
class HeldValue:
    """at: the forward op that makes it. wanted: the policy says MUST_SAVE."""

    at: int
    origin: Origin
    size_bytes: int
    wanted: bool


def note_wanted(joint: fx.Graph) -> None:
    """Before the partition, which has what one region hands to the next saved by the same tag."""
    for node in joint.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            node.meta[WANTED] = True


def held_values(program: Program, units: Sequence[RecomputeUnit]) -> tuple[HeldValue, ...]:
    """What `program` saves beside parameters, its inputs and what `units` free."""
    if program.forward is None or program.backward is None:
        return ()
    places = {node: at for at, node in enumerate(compute_nodes(program.forward.graph))}
    freed = {name for unit in units for name in unit.nodes}
    _, saved = returned(program)
    found = {}
    for node in saved:
        memory = owner(node)
        if node.name in freed or memory not in places or step_of(memory) is not None:
            continue
        wanted = WANTED in node.meta or WANTED in memory.meta
        origin = origin_of(maker(memory))
        found[memory] = HeldValue(places[memory], origin, tensor_bytes(memory), wanted)
    return tuple(found.values())


def folded(values: Iterable[HeldValue]) -> tuple[Held, ...]:
    """Those of alike modules as one, the largest first."""

    def kind(value: HeldValue) -> tuple[bool, str, str]:
        return value.wanted, value.origin.module, value.origin.op

    found = []
    for _, same in groupby(sorted(values, key=kind), kind):
        alike = list(same)
        size_bytes = sum(value.size_bytes for value in alike)
        found.append(Held(alike[0].origin, size_bytes, len(alike), alike[0].wanted))
    return tuple(sorted(found, key=lambda held: -held.size_bytes))
