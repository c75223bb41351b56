"""Views of a gathered parameter stand next to their first real use."""

from torch import fx

from graphshard.graph.program import Program, derived, is_unshard, positions, unshard_marks


def sink_views(program: Program) -> Program:
    """Move marks, and views and casts of them, down to just before their first other use.

    Before: the partition may leave them anywhere above their uses, often all at the top of
    backward. After: the first use of a group in graph order is where compute needs it. Order
    among all other nodes is unchanged.
    """
    for module in program.directions:
        chain = derived(mark.node for mark in unshard_marks(module.graph))
        for node in sorted(chain, key=positions(module.graph).__getitem__, reverse=True):
            if not node.users:
                if is_unshard(node):
                    module.graph.erase_node(node)
                continue
            _move_before_first_user(node)
    return program


def _move_before_first_user(node: fx.Node) -> None:
    min(node.users).prepend(node)  # fx nodes compare by their place in the graph
