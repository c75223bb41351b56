"""Cheap ops outside of checkpointed regions are computed again in backward, as Inductor does it.

In: the joint graph of a model that checkpoints parts of itself. What these save is the user's; the
rest, such as a loss behind them, saves what Inductor's min-cut would have it save: of a row of
pointwise ops not the last result but what the row begins with, where that is smaller. The loss of
a language model so saves its logits in bfloat16 and two numbers for each token, not the logarithms
of all probabilities in float32.

Assumed: what begins a row is not written to, draws no random number, and is read by no region that
is checkpointed; `tests/dist/test_losses.py` draws losses where one of these does not hold. Each row
saves less. The peak may rise all the same, as with Inductor: where forward cannot fuse away what
the row makes, it holds that beside what the row begins with (a teacher's logits in a loss: 16 %).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.owners import maker, owner
from graphshard.graph.program import is_reduce, is_unshard, is_view, output_node
from graphshard.graph.random_ops import is_random
from graphshard.passes.tag_recompute import AFTER_ALL_REGIONS
from graphshard.pricing.fusion import is_pointwise
from graphshard.pricing.liveness import tensor_bytes
from graphshard.pricing.repeatable import written_inputs


def repeat_cheap(joint: fx.Graph, num_outputs: int) -> None:
    """Tag rows of pointwise ops that are to be computed again. num_outputs: of forward."""
    forward = _forward(joint, num_outputs)
    behind, written = _behind_regions(joint, forward), written_inputs(joint)
    saved = {owner(node): None for node in forward if _is_read(node, forward)}
    for node in reversed(joint.nodes):  # the last result of a row first
        if node not in behind or owner(node) not in saved or not _is_cheap(node):
            continue
        row, begins = _row(node, behind)
        added = sum(tensor_bytes(one) for one in begins if one not in saved and _is_made(one))
        spared = sum(tensor_bytes(one) for one in row if one in saved)
        if written.isdisjoint(begins) and added < spared:
            for one in row:
                one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                one.meta["ac_graph_id"] = AFTER_ALL_REGIONS - 1
                saved.pop(one, None)
            saved |= dict.fromkeys(begins)


def _forward(joint: fx.Graph, num_outputs: int) -> dict[fx.Node, None]:
    outputs: Any = output_node(joint).args[0]
    return _reached(
        (n for n in outputs[:num_outputs] if isinstance(n, fx.Node)), lambda n: n.all_input_nodes
    )


def _behind_regions(joint: fx.Graph, forward: Collection[fx.Node]) -> set[fx.Node]:
    """What no checkpointed region reads, directly or through others, and is in none."""
    marked = [node for node in forward if "recompute" in node.meta]
    before = _reached(marked, lambda node: node.all_input_nodes)
    return {node for node in joint.nodes if node in forward and node not in before}


def _reached(
    nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            left += step(node)
    return found


def _is_read(node: fx.Node, forward: Collection[fx.Node]) -> bool:
    """Backward reads it."""
    return any(user not in forward and user.op != "output" for user in node.users)


def _is_made(node: fx.Node) -> bool:
    """It takes memory of its own in backward: it is no input, and no gathered parameter."""
    return node.op != "placeholder" and not is_unshard(maker(node))


def _is_cheap(node: fx.Node) -> bool:
    marks = is_unshard(node) or is_reduce(node)
    return node.op == "call_function" and not marks and _is_repeated(node)


def _is_repeated(node: fx.Node) -> bool:
    return (is_view(node) or is_pointwise(node)) and not is_random(node)


def _row(last: fx.Node, behind: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The pointwise ops that make `last`, and the memory that they begin with."""

    def before(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            if source in behind and _is_cheap(source):
                yield source

    row = list(_reached([last], before))
    begins = {owner(s): None for node in row for s in node.all_input_nodes if s not in row}
    return row, list(begins)
