"""Shards are saved for backward, gathered parameters never."""

from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.program import Program, derived, unshard_marks

# The partition saves what flows from one checkpointed region into a later one. Parameters belong
# to no region, so they count as the last.
AFTER_ALL_REGIONS = 1 << 30


def tag_recompute(program: Program) -> Program:
    """Make backward gather again instead of saving gathered parameters.

    Before: the joint graph. After: every `unshard` mark and everything that is only a view or a
    cast of it carries torch's MUST_RECOMPUTE tag, so that the partition repeats it in backward.
    Whether backward then really gathers (`reshard_after_forward`) is the runtime's decision.
    No-op under no_grad.
    """
    if program.joint is None:
        return program
    for node in derived(mark.node for mark in unshard_marks(program.joint.graph)):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = AFTER_ALL_REGIONS
    return program
