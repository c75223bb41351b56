"""The one module that calls Inductor: one region in, one callable out; joint passes, options.

What Inductor does with a whole model under `torch.compile` is done here part by part: its
decompositions and its passes on the joint graph before the partition, its code for each region
after the schedule is fixed. So nothing in it moves communication.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from graphshard.regions import Call

logger = logging.getLogger(__name__)


def decompositions(settings: dict[str, Any]) -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd has to take apart for Inductor."""
    with config.patch(settings):
        return select_decomp_table()


def joint_passes(joint: fx.GraphModule, settings: dict[str, Any]) -> fx.GraphModule:
    """Inductor's passes on a joint graph: random numbers, patterns, constants."""
    with config.patch(settings):
        return _recursive_joint_graph_passes(joint)


def compile_region(body: fx.GraphModule, settings: dict[str, Any], *, trains: bool) -> Call:
    """Code for one region. Raises what Inductor raises.

    settings: of `torch._inductor.config`. trains: the region is a part of a training step.
    """
    inputs = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(inputs)
    logger.debug("compiling a region of %d nodes", len(body.graph.nodes))
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), config.patch(settings):
        run = compile_fx_inner(body, inputs, is_inference=not trains)

    def call(args: list[Any]) -> Any:
        return run(args)

    return call
