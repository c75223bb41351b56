"""The one module that calls Inductor: one region in, one callable out; joint passes, options.

What Inductor does with a whole model under `torch.compile` is done here part by part: its
decompositions and its passes on the joint graph before the partition, its code for each region
after the schedule is fixed. So nothing in it moves communication.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import (
    _recursive_joint_graph_passes,
    compile_fx,
    compile_fx_inner,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.virtualized import V

from graphshard.codegen.regions import Call

MOST_AT_ONCE = 8


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
    bodies: Sequence[fx.GraphModule], settings: dict[str, Any], *, trains: bool
) -> list[Call]:
    """Code for regions, in their order. Raises what Inductor raises.

    settings: of `torch._inductor.config`. trains: the regions are parts of a training step.

    Inductor itself works on one region at a time. While it waits for the C++ compiler, it goes on
    with the next one.
    """
    grad = torch.is_grad_enabled()
    lock = _InductorLock()

    def work(body: fx.GraphModule) -> Call:
        with lock.taken(), torch.set_grad_enabled(grad):
            return _compiled(body, trains=trains)

    with config.patch(settings):
        if any(map(_is_on_gpu, bodies)):  # worker processes compile the kernels of each region
            return list(map(work, bodies))
        at_once = min(MOST_AT_ONCE, os.cpu_count() or 1)
        # Inductor's settings belong to a context, which a new thread does not have.
        contexts = [copy_context() for _ in bodies]
        with lock.released_while_waiting(), ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(lambda own, body: own.run(work, body), contexts, bodies))


class _InductorLock:
    """Who of several threads may use Inductor, which knows of one only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def released_while_waiting(self) -> Iterator[None]:
        """Inside, who has the lock releases it for as long as it waits for compiled kernels."""
        original = AsyncCompile.wait

        def wait(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
            if self._owner != threading.get_ident():
                original(compiler, scope)  # somebody else's
                return
            # Where Inductor collects what belongs to the cache entry of the region at hand.
            collected, TritonBundler._entries = TritonBundler._entries, None
            self._owner = None
            self._lock.release()
            try:
                original(compiler, scope)
            finally:
                self._lock.acquire()
                self._owner = threading.get_ident()
                TritonBundler._entries = collected

        AsyncCompile.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            AsyncCompile.wait = original  # type: ignore[method-assign]


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
