"""Costs of a model whose backward computes some activations again, from a few of its blocks.

In: captures of the model with fewer blocks, its lists of alike blocks, and what is computed again.
Blocks in a row that compute the same again are a run; of each run a few blocks are captured and
cut, and the rest is counted (`graphshard.offline.unroll`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TypeAlias

from graphshard.compiler.decide import graph_costs_of
from graphshard.compiler.partition import Cut, JointGraph, copied, cut_in_two, released
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

# Lists of alike blocks, each with how many of its blocks are captured.
Counts: TypeAlias = tuple[tuple[Repeat, int], ...]


@dataclass(slots=True)
class ShortModels:
    """One model with fewer blocks: each number of them is captured once, and cut once for each way.

    build: makes the whole model. Assumed: always the same, which `graphshard.offline.same_model`
    compares, so what is captured depends on how many blocks of each list are left, and on the
    ranks, but not on the blocks that they stand for.
    """

    build: Callable[[], Made]
    name: str
    _captures: dict[tuple[int, Counts, bool], JointGraph] = field(default_factory=dict)
    _cuts: dict[tuple[int, Counts, bool, bool], Cut] = field(default_factory=dict)

    def cut(self, world_size: int, counts: Counts, *, replaced: bool, fused: bool) -> Cut:
        """world_size: of all ranks, since `build` may make its own mesh. counts: see Counts.
        replaced: without the user's checkpoints. fused: see JointGraph."""
        key = world_size, counts, replaced, fused
        if key not in self._cuts:
            joint_graph = self._captured(world_size, counts, fused=fused)
            own = released(joint_graph) if replaced else copied(joint_graph)
            assert own is not None
            self._cuts[key] = cut_in_two(own, recompute=True, fused=fused)
        return self._cuts[key]

    def _captured(self, world_size: int, counts: Counts, *, fused: bool) -> JointGraph:
        key = world_size, counts, fused
        if key not in self._captures:
            with pretended(world_size):
                fake = faked(partial(self._built, counts))
                self._captures[key] = capture(fake, self.name, fused=fused).joint_graph
        return self._captures[key]

    def _built(self, counts: Counts) -> Made:
        made = self.build()
        for repeat, count in counts:
            shorten(made.model, repeat, count)
        return made


def recut(
    short: ShortModels,
    world_size: int,
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
    counts = tuple(
        (repeat, sum(run.captured for run in runs if run.container == repeat.container))
        for repeat in repeats
    )
    try:
        costs = costs_of(short, world_size, counts, _names(repeats, runs), planning, chosen)
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


def costs_of(
    short: ShortModels,
    world_size: int,
    counts: Counts,
    names: Mapping[str, str],
    planning: PlanningInputs,
    chosen: Recomputed,
) -> GraphCosts:
    """Of the captured blocks alone, under their names in the whole model."""
    two = short.cut(world_size, counts, replaced=chosen.replaced, fused=planning.fused)
    costs = graph_costs_of(two.parts, planning, recompute=True)
    groups = tuple(replace(info, fqn=_renamed(info.fqn, names)) for info in costs.groups)
    again = two.again(chosen_units(costs.units, groups, chosen))
    costs = graph_costs_of(again, planning, recompute=False)
    return replace(costs, groups=groups)


def _renamed(fqn: str, names: Mapping[str, str]) -> str:
    block = _block_of(fqn, names)
    return fqn if block is None else names[block] + fqn.removeprefix(block)
