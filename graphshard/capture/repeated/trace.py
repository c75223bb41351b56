"""One joint graph for all occurrences of a range, and one call in the place of each.

In: a graph that Dynamo captured. Out: the graph with a call of `graphshard::block` in place of each
range that repeats, and what the calls stand for. AOTAutograd sees that op and, in backward,
`graphshard::block_grad`; both carry layouts and never run (`graphshard.capture.repeated.expand`).
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true

from graphshard.capture.repeated.find import BlockRange, alike_ranges
from graphshard.codegen.lowering import Lowering
from graphshard.graph.owners import owner
from graphshard.graph.program import output_node

Traced = TypeVar("Traced")

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
_LIBRARY.define("block(Tensor[] tensors, SymInt[] sizes, int number, int instance) -> Tensor[]")
_LIBRARY.define(
    "block_grad(Tensor[] tensors, SymInt[] sizes, Tensor[] tangents, int number, int instance)"
    " -> Tensor[]"
)
BLOCK = torch.ops.graphshard.block.default
BLOCK_GRAD = torch.ops.graphshard.block_grad.default


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedBlock:
    """A range that was traced. graph: joint, or forward alone if nothing has a gradient.

    Its inputs are tensors, then sizes, then the gradients of those results that have one
    (`differentiable`); it returns the results, then a gradient or None for each input.
    requires_grad: of each result, as Dynamo saw it.
    """

    graph: fx.Graph
    differentiable: tuple[bool, ...]
    requires_grad: tuple[bool, ...]

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> list[fx.Node]:
        return self._returned()[: len(self.differentiable)]

    @property
    def gradients(self) -> list[fx.Node | None]:
        return self._returned()[len(self.differentiable) :]

    def _returned(self) -> list[Any]:
        return list(self.graph.find_nodes(op="output")[0].args[0])


class RepeatedBlockError(Exception):
    """A range cannot be traced by itself, or a graph not with calls of block `number`."""

    def __init__(self, why: str, number: int = -1) -> None:
        super().__init__(why)
        self.number = number


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Ranges that are alike, and the trace of the first one."""

    ranges: tuple[BlockRange, ...]
    block: RepeatedBlock


# Whose repeated blocks are being traced: the ops know theirs by number alone.
_TRACED: ContextVar[Sequence[RepeatedBlock]] = ContextVar("graphshard repeated blocks")


def traced_by_blocks(
    gm: fx.GraphModule,
    lowering: Lowering,
    trace: Callable[[fx.GraphModule, tuple[RepeatedBlock, ...]], Traced],
) -> Traced:
    """What `trace` makes of `gm`, with a call in place of each range that repeats.

    trace: is given the graph and what its calls stand for. Families of ranges whose calls turn
    out not to mean what the ops mean are left out, one after the other, and it is called again.
    """
    families = list(_families(gm, lowering))
    while families:
        module, blocks = _with_calls(gm, families), tuple(f.block for f in families)
        try:
            with _tracing(blocks):
                return trace(module, blocks)
        except RepeatedBlockError as error:
            left_out = families.pop(error.number)
            logger.debug("%d blocks are not traced once: %s", len(left_out.ranges), error)
    return trace(gm, ())


@contextmanager
def _tracing(blocks: Sequence[RepeatedBlock]) -> Iterator[None]:
    """Inside, graphs with calls of these repeated blocks can be traced."""
    token = _TRACED.set(blocks)
    try:
        with warnings.catch_warnings():
            # AOTAutograd's anomaly mode tells of our error, which is nothing to the user.
            warnings.filterwarnings("ignore", message="Error detected in _CallBackward")
            yield
    finally:
        _TRACED.reset(token)


def _families(gm: fx.GraphModule, lowering: Lowering) -> Iterator[Family]:
    """What cannot be traced by itself (a range that writes to its inputs, say) is in none."""
    for alike in alike_ranges(gm.graph):
        try:
            block = _traced(gm, alike[0], lowering)
        except Exception as error:  # whatever it is, AOTAutograd meets it again in the whole graph
            logger.debug("%d nodes are not traced by themselves: %s", len(alike[0].nodes), error)
        else:
            yield Family(alike, block)


def _with_calls(gm: fx.GraphModule, families: Sequence[Family]) -> fx.GraphModule:
    called = {
        block_range.nodes[0]: (block_range, number)
        for number, family in enumerate(families)
        for block_range in family.ranges
    }
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    inside = {node for block_range, _ in called.values() for node in block_range.nodes}
    for instance, node in enumerate(gm.graph.nodes):
        if node in called:
            block_range, number = called[node]
            tensors, sizes = _arguments(block_range)
            given = [new[n] for n in (*tensors, *sizes)]
            call = graph.call_function(_call, (number, instance, len(tensors), *given))
            for place, output in enumerate(block_range.outputs):
                new[output] = graph.call_function(operator.getitem, (call, place))
                new[output].meta = dict(output.meta)
        elif node not in inside:
            new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(gm, graph)


def _arguments(block_range: BlockRange) -> tuple[list[fx.Node], list[fx.Node]]:
    """Tensors and sizes. Symbols in the layouts are handed in, too: the whole graph has them as
    inputs, and would not ask a tensor for its size."""
    tensors = [n for n in block_range.inputs if isinstance(n.meta["example_value"], Tensor)]
    sizes = dict.fromkeys(n for n in block_range.inputs if n not in tensors)
    used = {s for n in tensors for s in free_symbols(n.meta["example_value"])}
    for node in block_range.nodes[0].graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and value.node.expr in used:
            sizes[node] = None
    return tensors, list(sizes)


def _traced(gm: fx.GraphModule, block_range: BlockRange, lowering: Lowering) -> RepeatedBlock:
    """Raises RepeatedBlockError, or what AOTAutograd raises, if the range cannot stand alone."""
    body = fx.Graph()
    tensors, sizes = _arguments(block_range)
    inputs = [*tensors, *sizes]
    new = {node: body.placeholder(f"in_{i}") for i, node in enumerate(inputs)}
    for node in block_range.nodes:
        new[node] = body.node_copy(node, new.__getitem__)
    body.output(tuple(new[n] for n in block_range.outputs))
    values = [n.meta["example_value"] for n in inputs]
    has_grad = tuple(_has_grad(n) for n in block_range.outputs)
    trains = torch.is_grad_enabled() and any(has_grad)
    with tracing(TracingContext(detect_fake_mode(values))):
        joint = lowering.joint(_joint(fx.GraphModule(gm, body), list(map(_leaf, values)), lowering))
    block = RepeatedBlock(joint.graph, tuple(trains and has for has in has_grad), has_grad)
    _check(block)
    return block


class _Traced(Exception):
    """Carries the traced graph out of AOTAutograd."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph


def _joint(module: fx.GraphModule, inputs: list[Any], lowering: Lowering) -> fx.GraphModule:
    def stop(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        raise _Traced(joint)

    compiler = aot_autograd(
        fw_compiler=stop,
        inference_compiler=stop,
        partition_fn=stop,
        decompositions=lowering.decompositions,
    )
    try:
        compiler(module, inputs)
    except _Traced as done:
        return done.graph
    raise RepeatedBlockError("AOTAutograd compiled nothing")


def _check(block: RepeatedBlock) -> None:
    """Raises RepeatedBlockError unless each result has its own memory, alone written to."""
    described = output_node(block.graph).meta["desc"][: len(block.results)]
    if [getattr(d, "idx", None) for d in described if isinstance(d, PlainAOTOutput)] != list(
        range(len(block.results))
    ):
        raise RepeatedBlockError("it writes to its inputs or to what it returns")
    owners = [owner(node) for node in block.results]
    if len(set(owners)) < len(owners) or any(node.op == "placeholder" for node in owners):
        raise RepeatedBlockError("it returns a view of an input or of another result")


def _has_grad(node: fx.Node) -> bool:
    return bool(node.meta["example_value"].requires_grad)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


# -- the ops -------------------------------------------------------------------------------------


def _call(number: int, instance: int, num_tensors: int, *args: Any) -> Any:
    """Raises RepeatedBlockError where a result requires grad otherwise than in the whole graph:
    ops are chosen by it. A parameter does under no_grad too, and no call gives such a result."""
    outputs = _Call.apply(number, instance, num_tensors, *args)  # type: ignore[no-untyped-call]
    if tuple(o.requires_grad for o in outputs) != _TRACED.get()[number].requires_grad:
        raise RepeatedBlockError("a result requires grad otherwise than in the whole graph", number)
    return outputs


class _Call(torch.autograd.Function):
    """Forward and backward of one occurrence, as AOTAutograd sees them."""

    @staticmethod
    def forward(ctx: Any, number: int, instance: int, num_tensors: int, *args: Any) -> Any:
        tensors, ctx.sizes = args[:num_tensors], args[num_tensors:]
        ctx.number, ctx.instance = number, instance
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with _blaming(number):
            outputs = BLOCK(tensors, ctx.sizes, number, instance)
        has_grad = _TRACED.get()[number].differentiable
        ctx.mark_non_differentiable(*(o for o, h in zip(outputs, has_grad, strict=True) if not h))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Raises RepeatedBlockError if AOTAutograd would make something else of the whole here."""
        number = ctx.number
        block = _TRACED.get()[number]
        tangents = [g for g, h in zip(grads, block.differentiable, strict=True) if h]
        _check_tangents(block, tangents, number)
        with _blaming(number):  # an input that was written to meanwhile, say
            made = BLOCK_GRAD(ctx.saved_tensors, ctx.sizes, tangents, number, ctx.instance)
        found = iter(made)
        own = (next(found) if n is not None else None for n in block.gradients)
        return None, None, None, *own


@contextmanager
def _blaming(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RepeatedBlockError(str(error), number) from error


def _check_tangents(block: RepeatedBlock, tangents: Sequence[Tensor | None], number: int) -> None:
    """Raises RepeatedBlockError unless gradients of results come as they did in the trace.

    If the loss does not hang on all results, eager has no gradient where zeros would make one. And
    of a gradient of another layout, views fail, or are other ops.
    """
    traced = [n.meta["val"] for n in block.placeholders[-len(tangents) :]] if tangents else []
    for tangent, expected in zip(tangents, traced, strict=True):
        if tangent is None:
            raise RepeatedBlockError("a result of a block has no gradient", number)
        if not _lies_as(tangent, expected):
            raise RepeatedBlockError(
                "a gradient comes in another layout than in the first block", number
            )


def _lies_as(value: Tensor, expected: Tensor) -> bool:
    """As far as is known of the sizes, without a guard on one; a dimension of one element has no
    stride."""
    kinds = [(v.dtype, v.is_conj(), v.is_neg(), v.dim()) for v in (value, expected)]
    dims = [list(zip(v.shape, v.stride(), strict=True)) for v in (value, expected)]
    return kinds[0] == kinds[1] and all(
        statically_known_true(size == other)
        and (statically_known_true(size == 1) or statically_known_true(stride == other_stride))
        for (size, stride), (other, other_stride) in zip(*dims, strict=True)
    )


def _block_fake(tensors: Any, sizes: Any, number: int, instance: int) -> list[Tensor]:
    made = _Made(tensors, sizes)
    return [made.like(node) for node in _TRACED.get()[number].results]


def _block_grad_fake(
    tensors: Any, sizes: Any, tangents: Any, number: int, instance: int
) -> list[Tensor]:
    made = _Made(tensors, sizes)
    return [made.like(node) for node in _TRACED.get()[number].gradients if node is not None]


class _Made:
    """Makes results of the layouts in a trace, with the caller's own symbols. Those of the trace
    are equal, but AOTAutograd would look for them elsewhere: of forward's sizes in a tangent."""

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> None:
        known = (*(n for t in tensors for n in (*t.shape, *t.stride())), *sizes)
        self._own = {n.node.expr: n for n in known if isinstance(n, torch.SymInt)}

    def like(self, node: fx.Node) -> Tensor:
        # All occurrences have inputs of the same layout, sizes that are symbols included.
        value = node.meta["val"]
        shape, strides = ([self._symbol(n) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)

    def _symbol(self, size: Any) -> Any:
        return self._own.get(size.node.expr, size) if isinstance(size, torch.SymInt) else size


torch.library.register_fake("graphshard::block", _block_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::block_grad", _block_grad_fake, lib=_LIBRARY)
