"""The one module that calls Inductor: one region in, one callable out; joint passes, options.

What Inductor does with a whole model under `torch.compile` is done here part by part: its
decompositions and its passes on the joint graph before the partition, its code for each region
after the schedule is fixed. So nothing in it moves communication.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.compile_fx import (
    _recursive_joint_graph_passes,
    compile_fx,
    compile_fx_inner,
)
from torch._inductor.cpu_vec_isa import supported_vec_isa_list, valid_vec_isa_list
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError
from torch._inductor.virtualized import V

from graphshard.codegen.kernels import Seat, compiled_together
from graphshard.codegen.regions import Call

logger = logging.getLogger(__name__)

TELL_EVERY_S = 10.0


def decompositions(settings: dict[str, Any]) -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd has to take apart for Inductor."""
    with config.patch(settings):
        return select_decomp_table()


def joint_passes(joint: fx.GraphModule, settings: dict[str, Any]) -> fx.GraphModule:
    """Inductor's passes on a joint graph: random numbers, patterns, constants."""
    inputs = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    with config.patch(settings), V.set_fake_mode(detect_fake_mode(inputs)):
        return _recursive_joint_graph_passes(joint)


def compile_whole(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]
) -> Callable[..., Any]:
    """A graph as it came from Dynamo, exactly as `torch.compile` has Inductor do it."""
    return compile_fx(gm, inputs, config_patches=settings)  # type: ignore[return-value]


def compile_regions(
    bodies: Sequence[fx.GraphModule], settings: dict[str, Any], *, trains: bool, seat: Seat
) -> list[Call]:
    """Code for regions, in their order. Raises what Inductor raises.

    settings: of `torch._inductor.config`. trains: the regions are parts of a training step.
    """
    with config.patch(settings):
        if any(map(_is_on_gpu, bodies)):  # worker processes compile the kernels of each region
            return [_compiled(body, trains=trains) for body in _told(bodies)]
        # Assumed: the compiler knows the vector instructions that the processor has. To try each
        # of them takes 6 s in the first launch on a machine.
        believed = config.cpp.vec_isa_ok is None
        try:
            with config.patch({"cpp.vec_isa_ok": True} if believed else {}):
                return _compiled_on_cpu(bodies, seat, trains=trains)
        except CppCompileError:
            if not believed:
                raise
            forget_vector_instructions()
            return _compiled_on_cpu(bodies, seat, trains=trains)


def forget_vector_instructions() -> None:
    """What Inductor has found out about them, and what it was made to believe."""
    valid_vec_isa_list.cache_clear()
    for kind in {kind for isa in supported_vec_isa_list for kind in type(isa).__mro__}:
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def _compiled_on_cpu(bodies: Sequence[fx.GraphModule], seat: Seat, *, trains: bool) -> list[Call]:
    with compiled_together(seat):
        return [_compiled(body, trains=trains) for body in _told(bodies)]


def _told(bodies: Sequence[fx.GraphModule]) -> Iterator[fx.GraphModule]:
    """`bodies`, with a line in the log of rank 0 now and then."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    told = time.monotonic()
    for done, body in enumerate(bodies):
        if is_first and time.monotonic() - told > TELL_EVERY_S:
            logger.info("compiling: %d of %d regions have code", done, len(bodies))
            told = time.monotonic()
        yield body


def _is_on_gpu(body: fx.GraphModule) -> bool:
    values = (node.meta["val"] for node in body.graph.find_nodes(op="placeholder"))
    return any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values)


def _compiled(body: fx.GraphModule, *, trains: bool) -> Call:
    inputs = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(inputs)
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        run = compile_fx_inner(body, inputs, is_inference=not trains)

    def call(args: list[Any]) -> Any:
        return run(args)

    return call
