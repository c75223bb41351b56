"""What `TORCH_TRACE=DIR` records of a compile, for tlparse: graphs, the plan, the collectives.

The only place that knows torch's structured log, which is private. Without TORCH_TRACE nothing is
put together. Outside a compile nothing is recorded, since tlparse sorts by compile. What fails here
ends no compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._logging._internal import trace_structured

from graphshard.files.information import informing


def graph_after(name: str, module: fx.GraphModule) -> None:
    """The graph of `module` after the pass `name`, as readable Python."""
    if not _is_compiling():
        return
    with informing("the structured trace", _folder()):
        trace_structured(
            "graph_dump",
            metadata_fn=lambda: {"name": f"graphshard_after_{name}"},
            payload_fn=lambda: module.print_readable(
                print_output=False, include_stride=True, include_device=True
            ),
        )


def plan_made(plan_json: Callable[[], str], collectives: Callable[[], Sequence[str]]) -> None:
    """The plan, and the names of its collectives in the order of issue.

    tlparse compares the artifact `inductor_collective_schedule` between ranks and warns where it
    differs (tlparse 0.4.3, `--all-ranks-html`).
    """
    if not _is_compiling():
        return
    _artifact("graphshard_plan", plan_json)
    _artifact("inductor_collective_schedule", lambda: list(collectives()))


def _artifact(name: str, payload: Callable[[], object]) -> None:
    with informing("the structured trace", _folder()):
        trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload
        )


def _folder() -> str:
    return os.environ.get("TORCH_TRACE", "TORCH_TRACE")


def _is_compiling() -> bool:
    return torch._guards.CompileContext.current_compile_id() is not None
