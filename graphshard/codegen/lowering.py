"""How the ops of a captured graph are run: one by one as captured, or as Inductor compiles them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

from graphshard.codegen.regions import Artifacts
from graphshard.options import Options


@dataclass(frozen=True, slots=True)
class Lowering:
    """decompositions: ops that AOTAutograd takes apart. joint: run before all other passes.

    artifacts: where compiled regions are kept; None: ops run one by one. whole: compiles a graph of
    Dynamo's in which there is nothing to communicate.
    """

    decompositions: dict[Any, Callable[..., Any]] | None
    joint: Callable[[fx.GraphModule], fx.GraphModule]
    artifacts: Artifacts | None
    whole: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None = None


# The CPU's kernel lays its result out as the gradient lies; torch traces a contiguous one, which is
# what the ops give that it takes this one apart into.
OTHER_LAYOUTS = (torch.ops.aten.native_dropout_backward,)


def lowering_of(options: Options, *, trains: bool) -> Lowering:
    """trains: the graph is a part of a training step."""
    if options.compute == "aten":
        return Lowering(get_decompositions(OTHER_LAYOUTS), _same, None)
    from graphshard.codegen import inductor  # takes a second to import

    settings = dict(options.inductor)
    compile_regions = partial(inductor.compile_regions, settings=settings, trains=trains)
    turn = int(os.environ.get("LOCAL_RANK", 0)) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Lowering(
        inductor.decompositions(settings),
        partial(inductor.joint_passes, settings=settings),
        Artifacts(compile_regions, turn),
        partial(inductor.compile_whole, settings=settings),
    )


def _same(joint: fx.GraphModule) -> fx.GraphModule:
    return joint
