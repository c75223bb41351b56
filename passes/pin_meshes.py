"""The mesh of a DTensor output is a constant of the graph."""

from torch import fx

from graphshard.graph.program import Program, adopt, is_tangent, output_node


def pin_meshes(program: Program) -> Program:
    """Replace forward outputs that are inputs of backward by constants.

    Before: a DTensor output is returned in parts, its mesh being one. DTensor's sharding rules
    may answer with an equal mesh of another model, which tracing then knows only as the mesh of
    the tangent, so that forward would depend on backward. After: no forward output is a tangent.
    No-op without DTensor outputs, and under no_grad.
    """
    if program.joint is None:
        return program
    graph = program.joint.graph
    out = output_node(graph)
    for node in list(graph.nodes):
        # Only meshes: a tangent that is a tensor may be the gradient of an input.
        if is_tangent(node) and out in node.users and hasattr(node.meta["val"], "real_obj"):
            out.replace_input_with(node, _constant(program.joint, node))
    return program


def _constant(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    name = adopt(module, node.meta["val"].real_obj, f"mesh_of_{node.name}")
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        constant = module.graph.create_node("get_attr", name)
    constant.meta = dict(node.meta)
    return constant
