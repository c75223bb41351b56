"""From a captured graph to a partition: cut in two and placed, in no order yet.

In come the graph that AOTAutograd hands over and the groups that it uses. Out comes a `Partition`,
the two graphs and the program with its communication placed naively, and, where backward is to
compute more again, another one (`Cut`). Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from graphshard.capture.dynamo import input_example, tracing_context
from graphshard.codegen.emit import with_run_input
from graphshard.compiler.cheap_again import repeat_cheap
from graphshard.compiler.planning import (
    place,
    run_captured,
    run_passes,
)
from graphshard.fsdp2.describe import describe
from graphshard.graph.program import (
    Program,
    copy_of,
    derived,
    output_node,
    reduce_marks,
    set_anchor_group,
    unshard_marks,
)
from graphshard.graph.random_ops import note_random_values, with_tags, without_tags
from graphshard.passes import RELEASED
from graphshard.passes.release_checkpoints import num_open
from graphshard.pricing.held import note_wanted
from graphshard.pricing.recompute import NO_UNITS, ChosenUnits, kept_beside, tag
from graphshard.runtime.live import LiveGroup, find
from graphshard.schedule.plan import GroupInfo


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
    name_anchors(joint, found)
    note_wanted(joint.graph)
    program = run_captured(Program(name, found.infos, outputs, joint=joint))
    context = tracing_context()

    def split(graph: fx.GraphModule, min_cut: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = min_cut_rematerialization_partition if min_cut else default_partition
        # To a gradient that is a constant no tangent leads, and it would be taken for forward's.
        for mark in reduce_marks(graph.graph):
            mark.node.meta["partitioner_tag"] = "must_be_in_backward"
        not_random = without_tags(graph.graph)
        # Of what torch copies on the way no code is ever wanted: as inside of Dynamo.
        with context(), _use_lazy_graph_module(True):
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
    if not joint_graph.checkpoints:
        return None
    program = run_passes(copied(joint_graph).program, RELEASED)
    assert program.joint is not None
    return replace(joint_graph, program=program, checkpointed=_is_checkpointed(program.joint.graph))


def copied(joint_graph: JointGraph) -> JointGraph:
    """One that can be used up."""
    joint = joint_graph.program.joint
    assert joint is not None
    return replace(joint_graph, program=replace(joint_graph.program, joint=copy_of(joint)))


@dataclass(frozen=True, slots=True)
class Cut:
    """A joint graph that is cut in two, and how to cut it so that it saves less on the device.
    checkpoints: as in `JointGraph`."""

    parts: Partition
    again: Callable[[ChosenUnits], Partition]
    checkpoints: int = 0


def cut_in_two(joint_graph: JointGraph, *, recompute: bool, fused: bool) -> Cut:
    """`joint_graph` is used up. recompute: it may be cut again. fused: see JointGraph."""
    joint = joint_graph.program.joint
    assert joint is not None
    spare = copy_of(joint) if recompute else joint
    parts = parts_of(joint_graph, joint, fused=fused)
    again = partial(repeating, joint_graph, spare, parts, fused=fused)
    return Cut(parts, again, joint_graph.checkpoints)


def repeating(
    joint_graph: JointGraph,
    joint: fx.GraphModule,
    parts: Partition,
    chosen: ChosenUnits,
    *,
    fused: bool,
) -> Partition:
    """A copy of `joint`, of which `parts` was made, cut so that `chosen` is what becomes of what
    these units free.

    Everything else that `parts` saves is saved again: that is what the choice was made on.
    """
    kept = kept_beside(parts.placed, chosen.again) if fused else frozenset()
    return parts_of(joint_graph, copy_of(joint), chosen, kept, fused=fused)


def parts_of(
    joint_graph: JointGraph,
    joint: fx.GraphModule,
    chosen: ChosenUnits = NO_UNITS,
    kept: Collection[str] = (),
    *,
    fused: bool = False,
) -> Partition:
    """`joint` cut in two, as `chosen` has it; it is used up.

    kept: names of nodes that are saved in any case. fused: see JointGraph.
    """
    tag(joint.graph, chosen.again, kept)
    # Over several checkpointed blocks the min-cut would start again from the first one.
    if fused and joint_graph.checkpointed:
        repeat_cheap(joint.graph, joint_graph.program.num_outputs)
    forward, backward = joint_graph.split(joint, fused and not joint_graph.checkpointed)
    cut = replace(
        joint_graph.program,
        joint=None,
        forward=with_run_input(forward),
        backward=with_run_input(backward),
    )
    return Partition(forward, backward, place(cut, chosen.ops_offloaded))


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


def name_anchors(gm: fx.GraphModule, found: Found) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        described = node.meta.get("desc")
        if isinstance(described, PlainAOTInput) and described.idx in found.anchors:
            set_anchor_group(node, found.anchors[described.idx])
