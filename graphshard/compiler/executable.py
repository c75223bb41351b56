"""What runs: one graph pair in its plan's order, and the code made of it, op by op or by region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from torch import fx

from graphshard.codegen.aten import emit_ops
from graphshard.codegen.emit import code_of, emit
from graphshard.codegen.regions import Artifacts, compile_missing, linked, sliced
from graphshard.graph.program import Program
from graphshard.options import Options
from graphshard.planner.problem import Problem
from graphshard.runtime.body import Body
from graphshard.schedule.plan import Direction, Plan, Step, StepKind

Segments: TypeAlias = dict[Direction, tuple[Step, ...]]


@dataclass(slots=True, eq=False)
class Executable:
    """One graph pair as it runs now, for those FSDP roots that call it together.

    artifacts: its compiled regions; None if ops run one by one. segments: what its marks separate;
    empty if unwatched. asked: directions of which AOTAutograd has the code, of all who share it.
    """

    program: Program
    plan: Plan
    problem: Problem
    bodies: dict[Direction, Body]
    options: Options
    artifacts: Artifacts | None = None
    segments: Segments = field(default_factory=dict)
    asked: set[Direction] = field(default_factory=set)

    @property
    def code(self) -> tuple[str, str]:
        """The emitted Python of forward and backward; it is written when somebody asks for it."""
        return code_of(self.program.forward), code_of(self.program.backward)

    @property
    def is_complete(self) -> bool:
        """AOTAutograd has asked for the code of both directions, for backward in the first step."""
        return len(self.asked) == len(self.program.by_direction)


def callables_of(
    running: Executable, modules: Mapping[Direction, fx.GraphModule]
) -> dict[Direction, Callable[[list[Any]], Any]]:
    """The boxed callables of a graph pair, marked or not. Raises what the compiler raises."""
    artifacts = running.artifacts
    if artifacts is None:
        return {direction: emit_ops(module) for direction, module in modules.items()}
    slices = {d: sliced(module, cuts(running.problem, d)) for d, module in modules.items()}
    compile_missing(list(slices.values()), artifacts)
    return {direction: emit(linked(part, artifacts)) for direction, part in slices.items()}


def stands_between(plan: Plan, problem: Problem) -> bool:
    """The communication of `plan` stands between regions of `problem`. That of another graph of its
    structure may not: the same ops in another order, as a length that is a symbol gives them."""
    return all(
        {step.stop for step in schedule.steps if step.kind is StepKind.COMPUTE}
        <= cuts(problem, schedule.direction)
        for schedule in plan.schedules
    )


def cuts(problem: Problem, direction: Direction) -> frozenset[int]:
    """The ops at which the problem's regions start."""
    return frozenset(accumulate(r.num_ops for r in problem.regions(direction)))
