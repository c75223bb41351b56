"""One `unshard` mark per parameter and graph."""

from graphshard.graph.program import Program, positions, unshard_marks


def drop_duplicates(program: Program) -> Program:
    """Let all uses of a parameter share one `unshard` mark.

    Before: a module that is called twice has a mark for each call. After: at most one mark per
    (group, parameter) and graph, at the place of the first. No-op when each module runs once.
    """
    for module in program.graphs:
        order = positions(module.graph)
        first: dict[tuple[int, int], object] = {}
        for mark in sorted(unshard_marks(module.graph), key=lambda m: order[m.node]):
            kept = first.setdefault((mark.group, mark.index), mark.node)
            if kept is not mark.node:
                mark.node.replace_all_uses_with(kept)  # type: ignore[arg-type]
                module.graph.erase_node(mark.node)
    return program
