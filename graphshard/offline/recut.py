"""Costs of a model whose backward computes some activations again, from a few of its blocks.

In: a function that builds the model, its lists of alike blocks, and what is computed again. Blocks
in a row that compute the same again are a run; of each run a few blocks are captured and cut, and
the rest is counted (`graphshard.offline.unroll`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from graphshard.compiler.decide import graph_costs_of
from graphshard.compiler.partition import cut_in_two, released
from graphshard.compiler.planning import PlanningInputs
from graphshard.errors import CaptureError
from graphshard.offline.capture import capture
from graphshard.offline.repeats import Repeat, is_inside, shorten
from graphshard.offline.unroll import unrolled
from graphshard.offline.world import Made, faked, pretended
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.recompute import chosen_units
from graphshard.pricing.region_cuts import AT_TURN
from graphshard.schedule.plan import GroupInfo, Recomputed


def recut(
    build: Callable[[], Made],
    name: str,
    repeats: Sequence[Repeat],
    infos: Sequence[GroupInfo],
    planning: PlanningInputs,
    chosen: Recomputed,
) -> GraphCosts | None:
    """None where nothing would be saved, or where the blocks of a run do not repeat exactly.

    infos: the groups of the whole model. chosen: of the whole model.
    """
    runs = [run for repeat in repeats for run in _runs(repeat, chosen)]
    if sum(run.captured for run in runs) == sum(repeat.count for repeat in repeats):
        return None
    names = _names(repeats, runs)
    try:
        costs = _short_costs(partial(_built, build, repeats, runs), name, names, planning, chosen)
    except CaptureError:
        return None
    whole: GraphCosts | None = costs
    for run in runs:
        if run.count > run.captured:
            whole = whole and unrolled(whole, run, infos)
    return whole if whole and len(whole.groups) == len(infos) else None


def _runs(repeat: Repeat, chosen: Recomputed) -> Iterator[Repeat]:
    """Blocks in a row of one list whose activations have the same fate."""
    fates: dict[str, set[tuple[bool, str, int]]] = defaultdict(set)
    for is_again, activations in ((True, chosen.activations), (False, chosen.offloaded)):
        for one in activations:
            block = _block_of(one.group, repeat.names)
            if block is not None:
                fates[block].add((is_again, one.group.removeprefix(block), one.number))
    behind = repeat.count
    for _, blocks in groupby(repeat.names, key=lambda block: frozenset(fates[block])):
        names = tuple(blocks)
        behind -= len(names)
        # Only the list's own last blocks are cut inside.
        yield Repeat(repeat.container, names, late=1 + max(1, AT_TURN - behind))


def _block_of(fqn: str, blocks: Iterable[str]) -> str | None:
    return next((block for block in blocks if is_inside(fqn, block)), None)


def _names(repeats: Sequence[Repeat], runs: Sequence[Repeat]) -> Mapping[str, str]:
    """Of each captured block: its name in the short model -> its name in the whole one."""
    found: dict[str, str] = {}
    for repeat in repeats:
        own = [run for run in runs if run.container == repeat.container]
        kept = [block for run in own for block in run.names[: run.captured]]
        found |= dict(zip(repeat.names, kept, strict=False))
    return found


def _built(build: Callable[[], Made], repeats: Sequence[Repeat], runs: Sequence[Repeat]) -> Made:
    made = build()
    for repeat in repeats:
        own = (run for run in runs if run.container == repeat.container)
        shorten(made.model, repeat, sum(run.captured for run in own))
    return made


def _short_costs(
    build: Callable[[], Made],
    name: str,
    names: Mapping[str, str],
    planning: PlanningInputs,
    chosen: Recomputed,
) -> GraphCosts:
    """Of the captured blocks alone, under their names in the whole model."""
    with pretended(planning.settings[0].ranks):
        joint_graph = capture(faked(build), name, fused=planning.fused).joint_graph
    if chosen.replaced:
        free = released(joint_graph)
        assert free is not None
        joint_graph = free
    two = cut_in_two(joint_graph, recompute=True, fused=planning.fused)
    costs = graph_costs_of(two.parts, planning, recompute=True)
    groups = tuple(replace(info, fqn=_renamed(info.fqn, names)) for info in costs.groups)
    again = two.again(chosen_units(costs.units, groups, chosen))
    costs = graph_costs_of(again, planning, recompute=False)
    return replace(costs, groups=groups)


def _renamed(fqn: str, names: Mapping[str, str]) -> str:
    block = _block_of(fqn, names)
    return fqn if block is None else names[block] + fqn.removeprefix(block)
