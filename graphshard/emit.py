"""From a scheduled program to callables: one generated Python function per direction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

from graphshard.errors import CaptureError
from graphshard.ir import Program
from graphshard.plan import Direction
from graphshard.runtime.calls import Calls
from graphshard.runtime.run import guarded


def with_run_input(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` whose first input is the run object; the original stays as it is."""
    clone = fx.GraphModule(module, copy.deepcopy(module.graph))
    first = next(iter(clone.graph.nodes))
    with clone.graph.inserting_before(first):
        clone.graph.placeholder("run")
    clone.recompile()
    return clone


def emit(
    program: Program, direction: Direction, given: fx.GraphModule, calls: Calls | None
) -> Callable[..., Any]:
    """The boxed callable of one direction. `calls` is for backward only.

    given: the graph for which AOTAutograd wants code now; its inputs have to be those of the
    program. Raises CaptureError otherwise.
    """
    module = program.forward if direction is Direction.FORWARD else program.backward
    assert module is not None
    wanted, have = _input_names(given), _input_names(module)[1:]
    if wanted != have:
        raise CaptureError("GS202", f"AOTAutograd changed the {direction} inputs: {wanted} {have}")
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    call = guarded(module.forward, direction, calls)
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def code_of(module: fx.GraphModule | None) -> str:
    """The Python of one direction, readable, with group names."""
    return "" if module is None else str(module.code)


def _input_names(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if n.op == "placeholder"]
