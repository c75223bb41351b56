"""One capture, many plans: what a compiled model runs is replaced, without compiling it again.

with kept_programs() as programs:
    ...                                 # the first step of the compiled model
run_as(model, programs, change)         # from now on it runs the plan that `change` makes
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from patching import patched
from torch import nn

from graphshard.capture.root_state import handle_of
from graphshard.compiler import graph_compiler
from graphshard.compiler.instrument import unwatch
from graphshard.compiler.planning import apply
from graphshard.graph.program import Program, copied
from graphshard.schedule.plan import Plan

Programs = dict[str, tuple[Program, Plan]]


@contextmanager
def kept_programs() -> Iterator[Programs]:
    """Of what is compiled inside: each program before its plan was applied, and that plan."""
    kept: Programs = {}

    def keeping(original: Callable[[Program, Plan], Program]) -> Callable[..., Any]:
        def call(placed: Program, plan: Plan) -> Program:
            kept[plan.name] = copied(placed), plan
            return original(placed, plan)

        return call

    with patched(graph_compiler, "apply", keeping):
        yield kept


def run_as(model: nn.Module, programs: Programs, change: Callable[[Plan], Plan]) -> Plan:
    """`model`, which has one plan, runs `change` of its first plan from now on."""
    handle = handle_of(model)
    assert handle is not None
    ((name, compiled),) = handle.root_state.plans.items()
    placed, first = programs[name]
    running, plan = compiled.running, change(first)
    running.program, running.plan = apply(copied(placed), plan), plan
    unwatch(running)
    handle.root_state.add(name, replace(compiled, plan=plan))
    return plan
