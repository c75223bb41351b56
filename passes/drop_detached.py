"""No `detach` inside a graph."""

import torch

from graphshard.graph.program import Program


def drop_detached(program: Program) -> Program:
    """Let whoever reads a detached tensor read the tensor.

    Before: `detach` ops from the user's code and from formulas of autograd. After: only those that
    the graph returns, since an output is told apart from the tensor that it shows. A traced graph
    has no autograd of its own, so a `detach` inside it does nothing but take time.
    """
    for module in program.graphs:
        for node in module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            if not any(user.op == "output" for user in node.users):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
    return program
