"""What a step of a whole model costs, from the few blocks of it that were captured.

In: the cuts of the captured blocks, the lists that they stand for, and the groups of all blocks.
Out: the costs; None where the captured blocks do not stand for the others (see `chain`, `unroll`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from graphshard.offline.chain import is_chain
from graphshard.offline.cuts import Cuts
from graphshard.offline.point import Point
from graphshard.offline.repeats import Repeat
from graphshard.offline.target import Sizes
from graphshard.offline.unroll import owners_of, unrolled
from graphshard.pricing.op_costs import GraphCosts, graph_costs
from graphshard.pricing.recompute import NO_UNITS
from graphshard.schedule.plan import GroupInfo

# sizes, machine, ranks per node, recompute, fused, in parts, freed: what costs of a graph hang on.
CostsKey: TypeAlias = tuple[Sizes, str, int, bool, bool, bool, bool]


def costs_key(point: Point, *, freed: bool) -> CostsKey:
    """Points with the same one have the same costs. Assumed: a machine's name says all of it but
    its ranks per node."""
    machine, again = point.job_machine, point.policy.recompute
    return (
        *(point.sizes, machine.name, machine.ranks_per_node),
        *(again, point.fused, point.in_parts, freed),
    )


def counted_costs(
    cuts: Cuts, repeats: Sequence[Repeat], infos: Sequence[GroupInfo], point: Point, *, freed: bool
) -> GraphCosts | None:
    """freed: with the user's checkpoints replaced. Without repeats, the costs of what was
    captured."""
    placed = cuts.cut(point.sizes, (NO_UNITS, point.fused, freed)).placed
    if not all(is_chain(placed, owners_of(placed.groups, r), r.captured) for r in repeats):
        return None
    costs: GraphCosts | None = graph_costs(
        placed,
        point.job_machine,
        recompute=point.policy.recompute,
        fused=point.fused,
        parts=point.in_parts,
    )
    for repeat in repeats:
        costs = costs and unrolled(costs, repeat, infos)
    # A group that is used behind the captured blocks alone would be forgotten.
    if costs is None or len(costs.groups) < len(infos):
        return None
    return costs
