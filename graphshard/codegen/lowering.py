"""How the ops of a captured graph are run: one by one as captured, or as Inductor compiles them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from graphshard.codegen import aten
from graphshard.codegen.regions import Artifacts
from graphshard.options import Options


@dataclass(frozen=True, slots=True)
class Lowering:
    """decompositions: ops that AOTAutograd takes apart. tracing: entered while it traces. joint:
    run before all other passes.

    artifacts: where compiled regions are kept; None: ops run one by one. whole: compiles a graph of
    Dynamo's in which there is nothing to communicate.
    """

    decompositions: dict[Any, Callable[..., Any]] | None
    tracing: Callable[[], AbstractContextManager[None]]
    joint: Callable[[fx.GraphModule], fx.GraphModule]
    artifacts: Artifacts | None
    whole: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None = None


def lowering_of(options: Options, *, trains: bool) -> Lowering:
    """trains: the graph is a part of a training step."""
    if options.compute == "aten":
        return Lowering(None, aten.as_eager, _same, None)
    from graphshard.codegen import inductor  # takes a second to import
    from graphshard.codegen.kernels import Seat

    settings, seat = dict(options.inductor), Seat.here()
    compile_regions = partial(inductor.compile_regions, settings=settings, trains=trains, seat=seat)
    return Lowering(
        inductor.decompositions(settings),
        nullcontext,
        partial(inductor.joint_passes, settings=settings),
        Artifacts(compile_regions, seat.number / seat.of),
        partial(inductor.compile_whole, settings=settings),
    )


def _same(joint: fx.GraphModule) -> fx.GraphModule:
    return joint
