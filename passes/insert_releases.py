"""Each gathered group is released after its last use."""

from graphshard.graph.program import (
    CommStep,
    Program,
    aliases,
    awaited_group,
    positions,
    set_step,
    steps,
)
from graphshard.schedule.plan import StepKind


def insert_releases(program: Program) -> Program:
    """Put `release` right after the last node that reads a gathered parameter or a view of it.

    Before: gathers without releases. After: one release per gather, except for a group of which
    a parameter or a view is an output of the graph (a graph break inside the module): that
    memory belongs to whoever receives the output. In forward, a group that backward gathers
    again gets `release_for_backward`, which may keep it; one that backward does not need knows that
    there is a backward.
    """
    again = _gathered_in_backward(program)
    for module in program.directions:
        is_forward = module is program.forward
        order = positions(module.graph)
        for wait, step in list(steps(module.graph, StepKind.GATHER_WAIT)):
            users = {u for node in aliases(wait.users) for u in (node, *node.users)}
            last = max(users, key=order.__getitem__)
            if last.op == "output":
                continue
            with module.graph.inserting_after(last):
                release = module.graph.call_method("release", (awaited_group(wait),))
            if is_forward and step.group in again:
                release.target = "release_for_backward"
            elif is_forward and program.backward is not None:
                release.kwargs = {"before_backward": True}
            release._rename(wait.name.replace("params_", "release_", 1))
            set_step(release, CommStep(StepKind.RELEASE, step.group))
    return program


def _gathered_in_backward(program: Program) -> set[int]:
    if program.backward is None:
        return set()
    return {step.group for _, step in steps(program.backward.graph, StepKind.GATHER_WAIT)}
