"""What the user's checkpoints may compute again or save is left to the planner."""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.program import Program

_OPEN = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)


def release_checkpoints(program: Program) -> Program:
    """Take the user's wishes off the ops of checkpointed regions.

    Before: the joint graph; ops in a region of `torch.utils.checkpoint` carry the policy of the
    user, by default PREFER_RECOMPUTE. After: none carries a PREFER policy. What the user says must
    be saved or computed again still is. No-op under no_grad.
    """
    if program.joint is None:
        return program
    for node in program.joint.graph.nodes:
        if _is_open(node):
            del node.meta["recompute"]
            node.meta.pop("ac_graph_id", None)
    return program


def num_open(joint: fx.Graph) -> int:
    """Checkpointed regions with an op that carries a PREFER policy."""
    return len({node.meta.get("ac_graph_id") for node in joint.nodes if _is_open(node)})


def _is_open(node: fx.Node) -> bool:
    return node.meta.get("recompute") in _OPEN
