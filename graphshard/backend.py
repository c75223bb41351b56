"""The `torch.compile` entry point: joins the stages, and falls back to FSDP2 when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard import dynamo, fallback, report
from graphshard.compiler import GraphCompiler, without_groups
from graphshard.errors import InfeasibleBudget
from graphshard.options import Options, parse_options

logger = logging.getLogger(__name__)


def graphshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured.

    A graph without `fully_shard` groups runs as it was captured. A graph that cannot be compiled
    is skipped: Dynamo runs the frame again in eager mode, with FSDP2's own hooks.

    Raises OptionsError (ValueError) for bad options, and with `options={"fallback": "error"}`
    whatever stood in the way of compiling.
    """
    settings = parse_options(options, mode)
    compiler = GraphCompiler(gm, _graph_name(), settings)
    if not compiler.groups:
        return without_groups(gm, example_inputs)
    fallback.warn_near_recompile_limit()
    try:
        compiled = compiler.compile(example_inputs)
    except dynamo.CONTROL_FLOW:
        raise
    except Exception as error:
        _give_up(compiler, error, settings)
        raise dynamo.skip_frame(f"graphshard: {error}") from error
    report.announce(compiler, settings)
    return compiled


def _give_up(compiler: GraphCompiler, error: Exception, settings: Options) -> None:
    if settings.fallback == "error" or isinstance(error, InfeasibleBudget):
        raise error  # a budget is a hard limit: FSDP2 would not keep it either
    for record in compiler.records:
        for live in compiler.groups:
            record.leave_eager(live.fqn, fallback.describe(error))
        record.plans.pop(compiler.name, None)
    fallback.warn_once(
        f"{len(compiler.groups)} groups run through eager FSDP2 because compiling "
        f"{compiler.name} failed: {fallback.describe(error)}"
    )
    logger.debug("compiling %s failed", compiler.name, exc_info=error)


def _graph_name() -> str:
    compile_id = torch._guards.CompileContext.current_compile_id()
    return f"graph {compile_id}" if compile_id is not None else "graph"


graphshard.is_graphshard_backend = True  # type: ignore[attr-defined]

dynamo.install(fallback.protected)
