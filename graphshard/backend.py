"""The `torch.compile` entry point: joins the stages, and falls back to FSDP2 when one fails."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard.capture import dynamo, fallback
from graphshard.capture.install import install
from graphshard.compiler.graph_compiler import GraphCompiler, without_groups
from graphshard.compiler.subclass_inputs import taking_subclasses
from graphshard.errors import (
    DivergedRanks,
    GraphshardError,
    InfeasibleBudget,
    UnsupportedModel,
)
from graphshard.options import Options, parse_options
from graphshard.report.announce import announce
from graphshard.runtime.agree import COMPILING, leave, mark, refuse
from graphshard.runtime.company import compiles

logger = logging.getLogger(__name__)


def graphshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured.

    A graph without `fully_shard` groups runs as it was captured. A graph that cannot be compiled
    is skipped: Dynamo runs the frame again in eager mode, with FSDP2's own hooks.

    Raises OptionsError (ValueError) for bad options, and with `options={"fallback": "error"}`
    whatever stood in the way of compiling.
    """
    settings = parse_options(options, mode)
    try:
        fallback.leave_what_is_read(gm, settings)
    except UnsupportedModel as error:
        return _raising(error)
    compiler = GraphCompiler(gm, _graph_name(), settings, announce)
    if not compiler.groups:
        return _without_groups(gm, example_inputs, settings)
    fallback.warn_near_recompile_limit()
    mark(compiler.ballots, COMPILING)
    forward = compiler.groups[0].counters.forwards
    compiles(compiler.ballots, forward, compiler.uses, _kind(gm, example_inputs))
    try:
        fallback.open_roots(compiler.root_states, settings)
        if compiler.is_eager:
            raise dynamo.skip_frame("graphshard: the ranks went to FSDP2")
        compiled = compiler.compile(example_inputs)
    except dynamo.CONTROL_FLOW:
        raise
    except DivergedRanks as error:
        return _part_ways(compiler, error, settings)
    except Exception as error:
        return _give_up(compiler, error, settings)
    compiler.announce()
    return taking_subclasses(compiled, example_inputs)


def _kind(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """What differs between graphs of one module: how many ops, and sizes that are constants."""
    sizes = [list(x.shape) if isinstance(x, torch.Tensor) else "" for x in example_inputs]
    return f"{len(gm.graph.nodes)} {sizes}"


def _without_groups(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options
) -> Callable[..., Any]:
    try:
        run = without_groups(gm, example_inputs, settings)
        return taking_subclasses(run, example_inputs)
    except dynamo.CONTROL_FLOW:
        raise
    except Exception as error:
        if settings.fallback == "error":
            if isinstance(error, GraphshardError):
                return _raising(error)
            raise
        why = fallback.describe(error)
        fallback.warn_once(f"{_graph_name()}, which has no group, runs in eager mode: {why}")
        raise dynamo.skip_frame(f"graphshard: {error}") from error


def _part_ways(
    compiler: GraphCompiler, error: DivergedRanks, settings: Options
) -> Callable[..., Any]:
    """All groups of the root go to FSDP2, on every rank; or what raises `error` when it is run."""
    for root_state in compiler.root_states:
        root_state.plans.pop(compiler.name, None)
    try:
        fallback.part_ways(compiler.root_states, error, settings)
    except DivergedRanks as final:
        return _raising(final)
    raise dynamo.skip_frame(f"graphshard: {error}") from error


def _raising(error: GraphshardError) -> Callable[..., Any]:
    """What raises `error` in place of the graph, at every call.

    Raised from the backend, Dynamo would wrap it. What is kept has no traceback, whose frames hold
    the model.
    """
    return functools.partial(_raise, copy.copy(error))


def _raise(error: GraphshardError, *args: Any) -> Any:
    raise copy.copy(error)


def _give_up(compiler: GraphCompiler, error: Exception, settings: Options) -> Callable[..., Any]:
    """The groups of the graph go to FSDP2, those of the root if only this rank cannot compile; or
    what raises `error` when it is run."""
    if isinstance(error, InfeasibleBudget):
        error = copy.copy(error)  # without what it was raised from
    # A budget is a hard limit: FSDP2 would not keep it either.
    is_final = settings.fallback == "error" or isinstance(error, InfeasibleBudget)
    # The other ranks must not run what this one cannot.
    why = fallback.describe(error)
    try:
        alone = not refuse(
            compiler.ballots,
            compiler.name,
            why,
            waits=not is_final,
            uses=compiler.uses,
            ends_early=compiler.ends_early,
        )
    except DivergedRanks as other:
        return _part_ways(compiler, other, settings)
    if is_final:
        if isinstance(error, GraphshardError):
            return _raising(error)
        raise error
    for root_state in compiler.root_states:
        for live in root_state.groups if alone else compiler.groups:
            root_state.leave_eager(live.fqn, why)
        root_state.plans.pop(compiler.name, None)
    if alone:
        leave(compiler.ballots, why)
    fallback.warn_once(
        f"{len(compiler.groups)} groups run through eager FSDP2 because compiling "
        f"{compiler.name} failed: {why}"
    )
    logger.debug("compiling %s failed", compiler.name, exc_info=error)
    raise dynamo.skip_frame(f"graphshard: {error}") from error


def _graph_name() -> str:
    compile_id = torch._guards.CompileContext.current_compile_id()
    return f"graph {compile_id}" if compile_id is not None else "graph"


graphshard.is_graphshard_backend = True  # type: ignore[attr-defined]
install()
