"""One `reduce_grad` mark per parameter and graph."""

import torch

from graphshard.errors import CaptureError
from graphshard.graph.program import Mark, Program, reduce_marks


def sum_gradients(program: Program) -> Program:
    """Add up the gradients of a parameter that several calls of its module produce.

    Before: one `reduce_grad` per `unshard` that capture made. After: one per (group, parameter),
    at the place of the last, on the sum in order of arrival, which is the order in which
    autograd adds them up in eager FSDP2 (one AccumulateGrad per parameter). The other tokens are
    replaced by the last one. No-op when each module runs once. Raises CaptureError when the
    gradients are DTensors that differ in their placements.
    """
    for module in program.graphs:
        by_param: dict[tuple[int, int], list[Mark]] = {}
        for mark in reduce_marks(module.graph):
            by_param.setdefault((mark.group, mark.index), []).append(mark)
        for (group, index), marks in by_param.items():
            *earlier, last = marks
            if len({m.layout for m in marks}) > 1:
                fqn = program.groups[group].params[index].fqn
                raise CaptureError("GS204", f"gradients of {fqn} are DTensors of several layouts")
            total = marks[0].node.args[0]
            with module.graph.inserting_before(last.node):
                for mark in marks[1:]:
                    addend = mark.node.args[0]
                    total = module.graph.call_function(torch.ops.aten.add.Tensor, (total, addend))
                    total.meta = dict(addend.meta)  # type: ignore[union-attr]
            last.node.update_arg(0, total)
            for mark in earlier:
                _hand_over_token(mark, last)
    return program


def _hand_over_token(mark: Mark, last: Mark) -> None:
    # Tokens are summed per anchor, possibly before `last`: drop this one from its sum instead.
    for user in list(mark.node.users):
        others = [a for a in user.all_input_nodes if a is not mark.node]
        if user.op == "output" or not others:
            user.replace_input_with(mark.node, last.node)
        else:
            user.replace_all_uses_with(others[0])
            user.graph.erase_node(user)
    mark.node.graph.erase_node(mark.node)
