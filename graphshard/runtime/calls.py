"""Forward calls that wait for their backward, and what arrives when it comes.

Two things about a backward are known only to the autograd engine, and eager FSDP2 depends on
both. Which outputs the loss really used: AOTAutograd fills the gradient of an unused output with
zeros, but parameters that hang on it alone keep `.grad` None. And whether a group was called
several times in one loss: autograd then adds up the unsharded gradients of all calls before
FSDP2 reduces once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_leaves

from graphshard.runtime.live import LiveGroup, lookup

ALL_DEFINED = -1  # every bit set: no tangent is missing
_CALL = "graphshard.call"  # in the metadata of an autograd node


class PendingCall:
    """One forward call, by its autograd node. `task` is the engine run that reached it last.

    It holds the groups that it used: backward needs them, also after the model itself is dropped.
    """

    __slots__ = ("_groups", "_node", "task")

    def __init__(self, node: Any, groups: Sequence[LiveGroup]) -> None:
        self._node = weakref.ref(node)
        self._groups = groups
        self.task = -1

    @property
    def is_alive(self) -> bool:
        return self._node() is not None

    @property
    def is_pending(self) -> bool:
        """No backward has reached it so far."""
        return self.task < 0 and self.is_alive

    def is_ahead(self, task: int) -> bool:
        """The engine run `task`, running now, has this call's backward still before it."""
        node = self._node()
        return self.task != task and node is not None and will_execute(node)


class Calls:
    """The calls of one compiled graph.

    positions: place of each tangent's output among the graph's outputs.
    anchors: places of the groups' anchors among the graph's inputs.
    """

    def __init__(self, positions: Sequence[int], anchors: Sequence[int]) -> None:
        self._positions = tuple(positions)
        self._anchors = tuple(anchors)
        # Per thread: models in several threads may share the graph, and the engine calls the hook
        # and the backward on one thread, one right after the other.
        self._now = threading.local()

    def begin(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Remember a forward call until its backward."""
        node = _autograd_node(outputs)
        if node is None:
            return
        _allow_retain_graph(node)
        groups = tuple([lookup(inputs[anchor]) for anchor in self._anchors])
        call = PendingCall(node, groups)
        for live in groups:
            add_call(live, call)
        node.metadata[_CALL] = call
        node.register_prehook(partial(self._arrive, call))

    def take_mask(self) -> int:
        """Bit k is set if tangent k arrived; valid once, for the backward that runs now."""
        mask = getattr(self._now, "mask", ALL_DEFINED)
        self._now.mask = ALL_DEFINED
        return mask

    def _arrive(self, call: PendingCall, gradients: tuple[Tensor | None, ...]) -> None:
        call.task = current_task()
        if len(self._positions) > 1:
            self._now.mask = sum(
                1 << bit
                for bit, position in enumerate(self._positions)
                if gradients[position] is not None
            )


class _Mark:
    """Lives as long as the autograd node that holds it. done: the node will not run again."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False

    def reached(self, gradients: Any) -> None:
        self.done = not torch._C._autograd._get_current_graph_task_keep_graph()


class PendingGraph:
    """The autograd graph that ends in one node, until its backward or until it is dropped."""

    __slots__ = ("_mark",)

    def __init__(self, node: Any) -> None:
        mark = _Mark()
        node.register_prehook(mark.reached)
        self._mark = weakref.ref(mark)

    @property
    def is_pending(self) -> bool:
        mark = self._mark()
        return mark is not None and not mark.done


def pending_graphs(result: Any) -> list[PendingGraph]:
    """Of what a forward returned; FSDP2 itself looks for tensors in the same way."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [PendingGraph(t.grad_fn) for t in tensors if t.grad_fn is not None]


def reaches_call(outputs: Sequence[Any]) -> bool:
    """The autograd graph of `outputs` (tensors or edges) has a call of a graph with groups."""
    known = [out for out in outputs if isinstance(out, Tensor | GradientEdge)]
    ahead = [o.node if isinstance(o, GradientEdge) else o.grad_fn for o in known]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if _CALL in node.metadata:  # type: ignore[operator] # a dict; the stub has a method
            return True
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
    return False


def when_done(then: Callable[[], None]) -> None:
    """Call `then` at the end of the engine run that is running now, unless it fails."""
    Variable._execution_engine.queue_callback(then)


def add_call(live: LiveGroup, call: PendingCall) -> None:
    live.calls = [c for c in live.calls if c.is_alive]
    live.calls.append(call)


def more_calls_ahead(live: LiveGroup) -> bool:
    """Another call of this group has its backward in the engine run that is running now."""
    if len(live.calls) < 2:
        return False
    task = current_task()
    return any(call.is_ahead(task) for call in live.calls)


def current_task() -> int:
    """The number of the engine run that this code is a part of, or -1."""
    return int(torch._C._current_graph_task_id())


def will_execute(node: Any) -> bool:
    """The engine run that is running now executes `node`."""
    return bool(torch._C._will_engine_execute_node(node))


def _allow_retain_graph(node: Any) -> None:
    """No buffer of the graph is donated; AOTAutograd takes an empty list for that, not None.

    It refuses `retain_graph=True` otherwise once the backward is compiled.
    """
    node._forward_cls.metadata.bw_donated_idxs = []


def _autograd_node(outputs: Any) -> Any:
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None and node.name() == "CompiledFunctionBackward":
            return node
    return None
