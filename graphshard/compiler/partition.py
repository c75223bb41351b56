"""From a captured graph to a planned partition: partitioned, placed and planned, in no order yet.

In come the graph that AOTAutograd hands over, the groups that it uses, and `PlanningInputs`
(settings, machine, policy). Out comes a `PlannedPartition`: the two graphs as they were
partitioned, the program with its communication placed naively, and its plan. A run and a plan made
offline differ only in where the inputs come from. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, TangentAOTInput
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

from graphshard.capture.dynamo import input_example, tracing_context
from graphshard.codegen.emit import with_run_input
from graphshard.compiler.planning import (
    FirstPlans,
    PlanningInputs,
    Posed,
    first_plans,
    is_worth,
    place,
    plan_with_costs,
    problem_of,
    run_captured,
    run_passes,
)
from graphshard.errors import InfeasibleBudget
from graphshard.fsdp2.describe import describe
from graphshard.graph.program import (
    Program,
    copy_of,
    derived,
    output_node,
    set_anchor_group,
    unshard_marks,
)
from graphshard.graph.random_ops import note_random_values, with_tags, without_tags
from graphshard.passes import RELEASED
from graphshard.passes.release_checkpoints import num_open
from graphshard.planner.problem import Problem
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.recompute import RecomputeUnit, activation_of, kept_beside, tag
from graphshard.runtime.live import LiveGroup, find
from graphshard.schedule.plan import GroupInfo, Plan, PricedOn, Recomputed

_Planned = TypeVar("_Planned")


@dataclass(frozen=True, slots=True)
class Found:
    """The groups that a graph uses. anchors: index of a graph input -> place in `groups`."""

    groups: list[LiveGroup]
    anchors: dict[int, int]

    @property
    def infos(self) -> tuple[GroupInfo, ...]:
        return tuple(describe(place, live.fsdp) for place, live in enumerate(self.groups))


@dataclass(frozen=True, slots=True)
class JointGraph:
    """A joint graph after the passes on the captured form, and AOTAutograd's ways to cut it.

    split: saves what backward reads; the flag asks for what Inductor does instead, which is to
    compute cheap ops again in backward where that saves less. checkpointed: the user says what to
    save, or to compute again. checkpoints: as in `Recomputed`, also where they were taken out.
    """

    program: Program
    checkpointed: bool
    checkpoints: int
    split: Callable[[fx.GraphModule, bool], tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, slots=True)
class Partition:
    """The two graphs of a partition, and a program made from copies of them, placed naively."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    placed: Program


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """problem: what the placed program of `parts` poses; `plan` is its answer."""

    parts: Partition
    problem: Problem
    plan: Plan


def find_groups(gm: fx.GraphModule) -> Found:
    """The groups whose anchors are inputs of a graph that Dynamo captured."""
    groups: dict[LiveGroup, int] = {}
    anchors: dict[int, int] = {}
    for index, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        live = find(input_example(placeholder))
        if live is not None:
            anchors[index] = groups.setdefault(live, len(groups))
    return Found(list(groups), anchors)


def joint_graph_of(
    name: str, joint: fx.GraphModule, inputs: Any, outputs: int, found: Found, kwargs: Any
) -> JointGraph:
    """What AOTAutograd asks to be partitioned; the arguments are those of its `partition_fn`."""
    _name_anchors(joint, found)
    program = run_captured(Program(name, found.infos, outputs, joint=joint))
    context = tracing_context()

    def split(graph: fx.GraphModule, min_cut: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = min_cut_rematerialization_partition if min_cut else default_partition
        not_random = without_tags(graph.graph)
        with context():
            forward, backward = partition(graph, inputs, num_fwd_outputs=outputs, **kwargs)
        for part in (forward, backward):
            with_tags(part.graph, not_random)
            note_random_values(part.graph)
        _order_saved(forward, backward, outputs)
        return forward, backward

    return JointGraph(program, _is_checkpointed(joint.graph), num_open(joint.graph), split)


def released(joint_graph: JointGraph) -> JointGraph | None:
    """A copy of a joint graph in which the planner decides what the user's checkpoints left open;
    None if there are no such checkpoints."""
    joint = joint_graph.program.joint
    assert joint is not None
    if not joint_graph.checkpoints:
        return None
    program = run_passes(replace(joint_graph.program, joint=copy_of(joint)), RELEASED)
    assert program.joint is not None
    return replace(joint_graph, program=program, checkpointed=_is_checkpointed(program.joint.graph))


@dataclass(frozen=True, slots=True)
class Cut:
    """A joint graph that is cut in two, and how to cut it so that it computes more again.
    checkpoints: as in `JointGraph`."""

    parts: Partition
    again: Callable[[tuple[RecomputeUnit, ...]], Partition]
    checkpoints: int = 0


def plan_partition(
    joint_graph: JointGraph,
    planning: PlanningInputs,
    settle: Callable[[Recomputed], Recomputed],
) -> PlannedPartition:
    """The plan of a captured graph, whose joint graph is used up. Raises InfeasibleBudget.

    settle: from what this rank would compute again to what all ranks do.
    """
    other = released(joint_graph) if planning.policy.replaces_checkpoints else None
    own = _cut(joint_graph, planning)
    free = None if other is None else _cut(other, planning)
    planned = decide(own, free, planning)
    chosen = settle(planned.plan.recompute)
    if chosen == planned.plan.recompute:
        return planned
    return decide(own, free, replace(planning, recompute_as=chosen))


def _cut(joint_graph: JointGraph, planning: PlanningInputs) -> Cut:
    """`joint_graph` is used up."""
    joint = joint_graph.program.joint
    assert joint is not None
    spare = copy_of(joint) if planning.policy.recompute else joint
    parts = parts_of(joint_graph, joint, fused=planning.fused)
    again = partial(repeating, joint_graph, spare, parts, fused=planning.fused)
    return Cut(parts, again, joint_graph.checkpoints)


def repeating(
    joint_graph: JointGraph,
    joint: fx.GraphModule,
    parts: Partition,
    chosen: Sequence[RecomputeUnit],
    *,
    fused: bool,
) -> Partition:
    """A copy of `joint`, of which `parts` was made, cut so that backward computes `chosen` again.

    Everything else that `parts` saves is saved again: that is what the choice was made on.
    """
    kept = kept_beside(parts.placed, chosen) if fused else frozenset()
    return parts_of(joint_graph, copy_of(joint), chosen, kept, fused=fused)


def plan_inference(
    name: str, gm: fx.GraphModule, found: Found, planning: PlanningInputs
) -> PlannedPartition:
    """The plan of a graph under no_grad. Raises InfeasibleBudget."""
    _name_anchors(gm, found)
    outputs = len(output_node(gm.graph).args[0])  # type: ignore[arg-type]
    program = run_captured(Program(name, found.infos, outputs, forward=gm))
    placed = place(replace(program, forward=with_run_input(gm)))
    parts = Partition(gm, None, placed)
    return decide(Cut(parts, lambda chosen: parts), None, planning)


def parts_of(
    joint_graph: JointGraph,
    joint: fx.GraphModule,
    repeated: Sequence[RecomputeUnit] = (),
    kept: Collection[str] = (),
    *,
    fused: bool = False,
) -> Partition:
    """`joint` cut in two, with the ops of `repeated` in both; it is used up.

    kept: names of nodes that are saved in any case. fused: see JointGraph.
    """
    tag(joint.graph, repeated, kept)
    # Over several checkpointed blocks the min-cut would start again from the first one.
    forward, backward = joint_graph.split(joint, fused and not joint_graph.checkpointed)
    cut = replace(
        joint_graph.program,
        joint=None,
        forward=with_run_input(forward),
        backward=with_run_input(backward),
    )
    return Partition(forward, backward, place(cut))


def decide(own: Cut, free: Cut | None, planning: PlanningInputs) -> PlannedPartition:
    """The better of two plans: with what the user's checkpoints say, and, if that may be replaced
    (`free`), without. Raises InfeasibleBudget if no schedule fits the policy's budget.
    """
    posed = pose(own, planning)
    if free is None:
        return decided(own, posed, planning)
    agreed = planning.recompute_as
    if agreed is not None and not agreed.replaced:
        return decided(own, posed, planning)
    freely = pose(free, planning, posed.problem)
    if agreed is not None:
        return decided(free, freely, planning)
    return better_of(
        partial(decided, own, posed, planning),
        partial(decided, free, freely, planning),
        lambda planned: planned.plan,
    )


def better_of(
    own: Callable[[], _Planned], free: Callable[[], _Planned], plan_of: Callable[[_Planned], Plan]
) -> _Planned:
    """What `free` finds where that is worth it, or where nothing else fits. Raises InfeasibleBudget
    if neither fits: the one that needs less."""
    try:
        theirs = own()
    except InfeasibleBudget as error:
        try:
            return free()
        except InfeasibleBudget as other:
            raise min(error, other, key=lambda one: one.shortage.least_bytes) from None
    try:
        ours = free()
    except InfeasibleBudget:
        return theirs
    return ours if is_worth(plan_of(ours), plan_of(theirs)) else theirs


def pose(cut: Cut, planning: PlanningInputs, baseline: Problem | None = None) -> Posed:
    """baseline: see Posed."""
    costs = graph_costs(
        cut.parts.placed, planning.machine,
        recompute=planning.policy.recompute, fused=planning.fused, parts=planning.in_parts,
    )  # fmt: skip
    return Posed(costs, problem_of(costs, planning), cut.checkpoints, baseline)


def decided(cut: Cut, posed: Posed, planning: PlanningInputs) -> PlannedPartition:
    """Plan the parts of `cut`, or what it makes of the graph where something is to be computed
    again.

    The second is planned anew, since the graph is another one then; what it is really worth counts.
    Raises InfeasibleBudget if no schedule fits the policy's budget.
    """
    first = first_plans(posed, planning)
    plain = None
    if first.without is not None:
        plain = PlannedPartition(cut.parts, posed.problem, first.without)
    if first.recompute.activations:
        groups, chosen = posed.costs.groups, set(first.recompute.activations)
        units = tuple(u for u in posed.costs.units if activation_of(u, groups) in chosen)
        found = _repeating(cut.again(units), first, planning, posed)
        plain = _better(found, plain, is_agreed=first.recompute == planning.recompute_as)
    assert plain is not None
    return replace(plain, plan=replace(plain.plan, priced_on=priced_on(planning)))


def _better(
    repeating: PlannedPartition | InfeasibleBudget,
    plain: PlannedPartition | None,
    *,
    is_agreed: bool,
) -> PlannedPartition:
    """The second, unless the first is agreed on or worth it. Raises what the first is if there is
    no second."""
    if isinstance(repeating, InfeasibleBudget):
        if plain is None:
            raise repeating
        return plain
    if plain is None or is_agreed or is_worth(repeating.plan, plain.plan):
        return repeating
    return plain


def _repeating(
    parts: Partition, first: FirstPlans, planning: PlanningInputs, posed: Posed
) -> PlannedPartition | InfeasibleBudget:
    """The plan of `parts`, whose backward computes again what `first` says, or why there is none.

    The budget stays that of `first`: FSDP2's own peak is that of the graph that it runs.
    """
    costs = graph_costs(
        parts.placed, planning.machine,
        recompute=False, fused=planning.fused, parts=planning.in_parts,
    )  # fmt: skip
    problem = replace(problem_of(costs, planning), budget_bytes=first.budget_bytes)
    baseline = posed.problem if posed.baseline is None else posed.baseline
    try:
        plan = plan_with_costs(costs, problem, planning.policy.reshard, baseline)
    except InfeasibleBudget as error:
        return error
    return PlannedPartition(parts, problem, replace(plan, recompute=first.recompute))


def priced_on(planning: PlanningInputs) -> PricedOn:
    return PricedOn(planning.machine.name, planning.settings[0].ranks_per_node, planning.fused)


def _order_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Put what is saved for backward in the order that AOTAutograd relies on: in forward tensors,
    opaque objects (the mesh of a DTensor), sizes; in backward sizes, tensors, opaque objects.

    torch 2.13 puts the random states of what a checkpoint computes again behind opaque objects.
    """
    node = output_node(forward.graph)
    outputs: Any = node.args[0]
    saved = range(num_outputs, len(outputs))
    order = [*range(num_outputs), *sorted(saved, key=lambda place: _kind(outputs[place]))]
    if order == list(range(len(outputs))):
        return
    node.args = (type(outputs)(outputs[place] for place in order),)
    if "desc" in node.meta:
        node.meta["desc"] = [node.meta["desc"][place] for place in order]
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = [p for p in placeholders if isinstance(p.meta.get("desc"), TangentAOTInput)]
    for opaque in (p for p in placeholders if _kind(p) == _OPAQUE):
        tangents[0].prepend(opaque)


_TENSOR, _OPAQUE, _SIZE = range(3)


def _kind(saved: Any) -> int:
    value = saved.meta.get("val") if isinstance(saved, fx.Node) else None
    if isinstance(value, torch.Tensor):
        return _TENSOR
    return _SIZE if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else _OPAQUE


def _is_checkpointed(joint: fx.Graph) -> bool:
    """Something else than gathered parameters is to be saved or computed again."""
    gathered = set(derived(mark.node for mark in unshard_marks(joint)))
    return any("recompute" in node.meta and node not in gathered for node in joint.nodes)


def _name_anchors(gm: fx.GraphModule, found: Found) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        described = node.meta.get("desc")
        if isinstance(described, PlainAOTInput) and described.idx in found.anchors:
            set_anchor_group(node, found.anchors[described.idx])
