"""One trace, many compilations: what Dynamo and AOTAutograd traced of the first model serves others
that are like it.

once = TracedOnce()
model = once.compiled(partial(build, case, ctx), memory_budget=budget)

Each model is compiled with its own options when it is called first: passes, plan, the question to
the other ranks, emitted code. Only the trace is not made again, which takes most of the time. What
is asked for must not change the trace: models of one class and of one sharding, inputs of one
layout; ways to compute (`compute`) each have a trace of AOTAutograd's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from patching import patched
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch.utils.hooks import RemovableHandle

from graphshard.backend import graphshard
from graphshard.compiler import graph_compiler
from graphshard.compiler.partition import Found, find_groups
from graphshard.fsdp2 import modules_of
from graphshard.graph.program import copy_of
from graphshard.runtime.live import Root, lookup

Run = Callable[..., Any]


@dataclass(eq=False)
class Graph:
    """What Dynamo traced. anchors: as in `Found`. inputs: fake. joints: what AOTAutograd made of
    it, for each way to compute, in the order in which it was asked. runs: what each root runs."""

    module: fx.GraphModule
    anchors: Mapping[int, int]
    inputs: Sequence[Any]
    context: TracingContext
    number: CompileContext
    joints: dict[object, list[Any]] = field(default_factory=dict)
    runs: WeakKeyDictionary[Root, Run] = field(default_factory=WeakKeyDictionary)

    def compiled(self, args: Sequence[Any], options: Mapping[str, object]) -> Run:
        """For the groups of a call with these inputs."""
        lives = {number: lookup(args[place]) for place, number in self.anchors.items()}
        found = Found([lives[number] for number in sorted(lives)], dict(self.anchors))
        with ExitStack() as inside:
            inside.enter_context(compile_context(self.number))
            inside.enter_context(tracing(self.context))
            inside.enter_context(torch.random.fork_rng(devices=[]))
            inside.enter_context(patched(graph_compiler, "find_groups", lambda _: lambda gm: found))
            inside.enter_context(self._traced(options.get("compute")))
            return graphshard(self.module, self.inputs, options=options)

    @contextmanager
    def _traced(self, compute: object) -> Iterator[None]:
        """Inside, AOTAutograd gets copies of the joint graphs that it made before."""
        known = self.joints.get(compute)
        made: list[Any] = []
        left = iter(known or ())

        def once(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                joint, *rest = next(left) if known else original(*args, **kwargs)
                made.append((joint, *rest))
                return copy_of(joint), *rest

            return call

        with patched(graph_compile, "aot_dispatch_autograd_graph", once):
            yield
        if made:
            self.joints.setdefault(compute, made)


class TracedOnce:
    """Models that share what was traced of the first of them. Each length is traced by itself."""

    def __init__(self) -> None:
        self._options: WeakKeyDictionary[nn.Module, dict[str, object]] = WeakKeyDictionary()

        def backend(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
            return self._entry(_graph_of(gm))

        backend.is_graphshard_backend = True  # type: ignore[attr-defined]
        self._backend = backend

    def compiled(self, make: Callable[[], nn.Module], **options: object) -> nn.Module:
        """What `make` builds, compiled at its first call."""
        # Of modules that share a group Dynamo guards the numbers of the hooks.
        with mock.patch.object(RemovableHandle, "next_id", 1_000_000):
            model = make()
        self._options[model] = {"fallback": "error", **options}
        given: Any = {"fallback": "error"}  # of all: Dynamo traces again for other ones
        model.compile(backend=self._backend, options=given, fullgraph=True, dynamic=False)
        return model

    def _entry(self, graph: Graph) -> Run:
        lead = next(iter(graph.anchors))

        def call(*args: Any) -> Any:
            root = lookup(args[lead]).root
            if root not in graph.runs:
                model = modules_of(root.groups[0].fsdp.state)[0]
                graph.runs[root] = graph.compiled(args, self._options[model])
            return graph.runs[root](*args)

        return call


def _graph_of(gm: fx.GraphModule) -> Graph:
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    assert all(isinstance(value, torch.Tensor) for value in inputs), "a size is a symbol"
    number = CompileContext.get()
    return Graph(gm, find_groups(gm).anchors, inputs, TracingContext.get(), number)
