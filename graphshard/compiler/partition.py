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
from typing import Any

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
    PlanningInputs,
    agreed_plans,
    is_worth,
    place,
    plan_with_costs,
    problem_of,
    run_captured,
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
from graphshard.planner.problem import Problem
from graphshard.pricing.op_costs import graph_costs
from graphshard.pricing.recompute import RecomputeUnit, activation_of, kept_beside, tag
from graphshard.runtime.live import LiveGroup, find
from graphshard.schedule.plan import Activation, GroupInfo, Plan, PricedOn


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
    compute cheap ops again in backward where that saves less. With checkpointing in the graph,
    that decides in both cases.
    """

    program: Program
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
    # Over several checkpointed blocks the min-cut would start again from the first one.
    may_cut = not _is_checkpointed(joint.graph)

    def split(graph: fx.GraphModule, fused: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
        min_cut = fused and may_cut
        partition = min_cut_rematerialization_partition if min_cut else default_partition
        not_random = without_tags(graph.graph)
        with context():
            forward, backward = partition(graph, inputs, num_fwd_outputs=outputs, **kwargs)
        for part in (forward, backward):
            with_tags(part.graph, not_random)
            note_random_values(part.graph)
        _order_saved(forward, backward, outputs)
        return forward, backward

    return JointGraph(program, split)


def plan_partition(
    joint_graph: JointGraph,
    planning: PlanningInputs,
    settle: Callable[[tuple[Activation, ...]], tuple[Activation, ...]],
) -> PlannedPartition:
    """The plan of a captured graph, whose joint graph is used up. Raises InfeasibleBudget.

    settle: from what this rank would compute again to what all ranks do.
    """
    joint = joint_graph.program.joint
    assert joint is not None
    spare = copy_of(joint) if planning.policy.recompute else joint
    parts = parts_of(joint_graph, joint, fused=planning.fused)
    again = partial(repeating, joint_graph, spare, parts, fused=planning.fused)
    planned = decide(parts, planning, again)
    chosen = settle(planned.plan.recompute)
    if chosen == planned.plan.recompute:
        return planned
    return decide(parts, replace(planning, recompute_as=chosen), again)


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
    return decide(Partition(gm, None, placed), planning, lambda chosen: Partition(gm, None, placed))


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
    forward, backward = joint_graph.split(joint, fused)
    cut = replace(
        joint_graph.program,
        joint=None,
        forward=with_run_input(forward),
        backward=with_run_input(backward),
    )
    return Partition(forward, backward, place(cut))


def decide(
    parts: Partition,
    planning: PlanningInputs,
    again: Callable[[tuple[RecomputeUnit, ...]], Partition],
) -> PlannedPartition:
    """Plan `parts`, or what `again` makes of the graph where something is to be computed again.

    The second is planned anew, since the graph is another one then; what it is really worth counts.
    Raises InfeasibleBudget if no schedule fits the policy's budget.
    """
    recompute, fused = planning.policy.recompute, planning.fused
    costs = graph_costs(
        parts.placed, planning.machine, recompute=recompute, fused=fused, parts=planning.in_parts
    )
    problem = problem_of(costs, planning)
    plan, without = agreed_plans(costs, planning, problem)
    planned = PlannedPartition(parts, problem, plan)
    if plan.recompute:
        units = tuple(u for u in costs.units if activation_of(u, costs.groups) in plan.recompute)
        plain = None if without is None else PlannedPartition(parts, problem, without)
        is_agreed = plan.recompute == planning.recompute_as
        found = _repeating(again(units), plan, planning, problem)
        planned = _better(found, plain, is_agreed=is_agreed)
    return replace(planned, plan=replace(planned.plan, priced_on=priced_on(planning)))


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
    parts: Partition, chosen: Plan, planning: PlanningInputs, baseline: Problem
) -> PlannedPartition | InfeasibleBudget:
    """The plan of `parts`, whose backward computes again what `chosen` says, or why there is none.

    The budget stays that of `chosen`: FSDP2's own peak is that of the graph that saves everything.
    """
    costs = graph_costs(
        parts.placed, planning.machine,
        recompute=False, fused=planning.fused, parts=planning.in_parts,
    )  # fmt: skip
    assert chosen.estimate is not None
    budget_bytes = chosen.estimate.budget_bytes
    problem = replace(problem_of(costs, planning), budget_bytes=budget_bytes)
    try:
        plan = plan_with_costs(costs, problem, planning.policy.reshard, baseline)
    except InfeasibleBudget as error:
        return error
    return PlannedPartition(parts, problem, replace(plan, recompute=chosen.recompute))


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
