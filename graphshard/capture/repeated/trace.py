"""One joint graph for all occurrences of a stretch, and one call in the place of each.

In: a graph that Dynamo captured. Out: the graph with a call of `graphshard::piece` in place of each
stretch that repeats, and what the calls stand for. AOTAutograd sees that op and, in backward,
`graphshard::piece_grad`; both carry layouts and never run (`graphshard.capture.repeated.expand`).
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
from torch.fx.experimental.symbolic_shapes import free_symbols

from graphshard.capture.repeated.find import BlockRange, alike_stretches
from graphshard.codegen.lowering import Lowering
from graphshard.graph.owners import owner
from graphshard.graph.program import output_node

Traced = TypeVar("Traced")

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
_LIBRARY.define("piece(Tensor[] tensors, SymInt[] sizes, int number, int instance) -> Tensor[]")
_LIBRARY.define(
    "piece_grad(Tensor[] tensors, SymInt[] sizes, Tensor[] tangents, int number, int instance)"
    " -> Tensor[]"
)
PIECE = torch.ops.graphshard.piece.default
PIECE_GRAD = torch.ops.graphshard.piece_grad.default


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedBlock:
    """A stretch that was traced. graph: joint, or forward alone if nothing has a gradient.

    Its inputs are tensors, then sizes, then the gradients of those results that have one
    (`differentiable`); it returns the results, then a gradient or None for each input.
    """

    graph: fx.Graph
    differentiable: tuple[bool, ...]

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
    """A stretch cannot be traced by itself, or a graph not with the calls of piece `number`."""

    def __init__(self, why: str, number: int = -1) -> None:
        super().__init__(why)
        self.number = number


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Stretches that are alike, and the trace of the first one."""

    stretches: tuple[BlockRange, ...]
    piece: RepeatedBlock


# Whose pieces are being traced: the ops know theirs by number alone.
_TRACED: ContextVar[Sequence[RepeatedBlock]] = ContextVar("graphshard pieces")


def traced_by_pieces(
    gm: fx.GraphModule,
    lowering: Lowering,
    trace: Callable[[fx.GraphModule, tuple[RepeatedBlock, ...]], Traced],
) -> Traced:
    """What `trace` makes of `gm`, with a call in place of each stretch that repeats.

    trace: is given the graph and what its calls stand for. Families of stretches whose calls turn
    out not to mean what the ops mean are left out, one after the other, and it is called again.
    """
    families = list(_families(gm, lowering))
    while families:
        module, pieces = _with_calls(gm, families), tuple(f.piece for f in families)
        try:
            with _tracing(pieces):
                return trace(module, pieces)
        except RepeatedBlockError as error:
            left_out = families.pop(error.number)
            logger.debug("%d blocks are no pieces: %s", len(left_out.stretches), error)
    return trace(gm, ())


@contextmanager
def _tracing(pieces: Sequence[RepeatedBlock]) -> Iterator[None]:
    """Inside, graphs with calls of these pieces can be traced."""
    token = _TRACED.set(pieces)
    try:
        with warnings.catch_warnings():
            # AOTAutograd's anomaly mode tells of a PieceError, which is nothing to the user.
            warnings.filterwarnings("ignore", message="Error detected in _CallBackward")
            yield
    finally:
        _TRACED.reset(token)


def _families(gm: fx.GraphModule, lowering: Lowering) -> Iterator[Family]:
    """What cannot be traced by itself (a stretch that writes to its inputs, say) is in none."""
    for alike in alike_stretches(gm.graph):
        try:
            piece = _traced(gm, alike[0], lowering)
        except Exception as error:  # whatever it is, AOTAutograd meets it again in the whole graph
            logger.debug("%d nodes are no piece: %s", len(alike[0].nodes), error)
        else:
            yield Family(alike, piece)


def _with_calls(gm: fx.GraphModule, families: Sequence[Family]) -> fx.GraphModule:
    called = {
        stretch.nodes[0]: (stretch, number)
        for number, family in enumerate(families)
        for stretch in family.stretches
    }
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    inside = {node for stretch, _ in called.values() for node in stretch.nodes}
    for instance, node in enumerate(gm.graph.nodes):
        if node in called:
            stretch, number = called[node]
            tensors, sizes = _arguments(stretch)
            given = [new[n] for n in (*tensors, *sizes)]
            call = graph.call_function(_call, (number, instance, len(tensors), *given))
            for place, output in enumerate(stretch.outputs):
                new[output] = graph.call_function(operator.getitem, (call, place))
                new[output].meta = dict(output.meta)
        elif node not in inside:
            new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(gm, graph)


def _arguments(stretch: BlockRange) -> tuple[list[fx.Node], list[fx.Node]]:
    """Tensors and sizes. Symbols in the layouts are handed in, too: the whole graph has them as
    inputs, and would not ask a tensor for its size."""
    tensors = [n for n in stretch.inputs if isinstance(n.meta["example_value"], Tensor)]
    sizes = dict.fromkeys(n for n in stretch.inputs if n not in tensors)
    used = {s for n in tensors for s in free_symbols(n.meta["example_value"])}
    for node in stretch.nodes[0].graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and value.node.expr in used:
            sizes[node] = None
    return tensors, list(sizes)


def _traced(gm: fx.GraphModule, stretch: BlockRange, lowering: Lowering) -> RepeatedBlock:
    """Raises PieceError, or what AOTAutograd raises, if the stretch cannot stand alone."""
    body = fx.Graph()
    tensors, sizes = _arguments(stretch)
    inputs = [*tensors, *sizes]
    new = {node: body.placeholder(f"in_{i}") for i, node in enumerate(inputs)}
    for node in stretch.nodes:
        new[node] = body.node_copy(node, new.__getitem__)
    body.output(tuple(new[n] for n in stretch.outputs))
    values = [n.meta["example_value"] for n in inputs]
    trains = torch.is_grad_enabled() and any(_has_grad(n) for n in stretch.outputs)
    with tracing(TracingContext(detect_fake_mode(values))):
        joint = lowering.joint(_joint(fx.GraphModule(gm, body), list(map(_leaf, values)), lowering))
    piece = RepeatedBlock(joint.graph, tuple(trains and _has_grad(n) for n in stretch.outputs))
    _check(piece)
    return piece


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


def _check(piece: RepeatedBlock) -> None:
    """Raises PieceError unless each result is memory of its own and nothing else is written."""
    described = output_node(piece.graph).meta["desc"][: len(piece.results)]
    if [getattr(d, "idx", None) for d in described if isinstance(d, PlainAOTOutput)] != list(
        range(len(piece.results))
    ):
        raise RepeatedBlockError("it writes to its inputs or to what it returns")
    owners = [owner(node) for node in piece.results]
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
    return _Call.apply(number, instance, num_tensors, *args)  # type: ignore[no-untyped-call]


class _Call(torch.autograd.Function):
    """Forward and backward of one occurrence, as AOTAutograd sees them."""

    @staticmethod
    def forward(ctx: Any, number: int, instance: int, num_tensors: int, *args: Any) -> Any:
        tensors, ctx.sizes = args[:num_tensors], args[num_tensors:]
        ctx.number, ctx.instance = number, instance
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with _blaming(number):
            outputs = PIECE(tensors, ctx.sizes, number, instance)
        has_grad = _TRACED.get()[number].differentiable
        ctx.mark_non_differentiable(*(o for o, h in zip(outputs, has_grad, strict=True) if not h))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Raises PieceError if the trace is not what AOTAutograd would make of the whole here."""
        number = ctx.number
        piece = _TRACED.get()[number]
        tangents = [g for g, h in zip(grads, piece.differentiable, strict=True) if h]
        _check_tangents(piece, tangents, number)
        with _blaming(number):  # an input that was written to meanwhile, say
            made = PIECE_GRAD(ctx.saved_tensors, ctx.sizes, tangents, number, ctx.instance)
        found = iter(made)
        own = (next(found) if n is not None else None for n in piece.gradients)
        return None, None, None, *own


@contextmanager
def _blaming(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RepeatedBlockError(str(error), number) from error


def _check_tangents(piece: RepeatedBlock, tangents: Sequence[Tensor | None], number: int) -> None:
    """Raises PieceError unless gradients of results come as they did when the piece was traced.

    If the loss does not hang on all results, eager has no gradient where zeros would make one. And
    of a gradient of another layout, views fail, or are other ops.
    """
    traced = [n.meta["val"] for n in piece.placeholders[-len(tangents) :]] if tangents else []
    for tangent, expected in zip(tangents, traced, strict=True):
        if tangent is None:
            raise RepeatedBlockError("a result of a block has no gradient", number)
        if _memory(tangent) != _memory(expected):
            raise RepeatedBlockError(
                "a gradient comes in another layout than in the first block", number
            )


def _memory(value: Tensor) -> tuple[Any, ...]:
    """How the elements lie; a dimension of one element has no stride."""
    strides = [s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
    return value.dtype, tuple(value.shape), strides, value.is_conj(), value.is_neg()


def _piece_fake(tensors: Any, sizes: Any, number: int, instance: int) -> list[Tensor]:
    return [_like(node) for node in _TRACED.get()[number].results]


def _piece_grad_fake(
    tensors: Any, sizes: Any, tangents: Any, number: int, instance: int
) -> list[Tensor]:
    return [_like(node) for node in _TRACED.get()[number].gradients if node is not None]


def _like(node: fx.Node) -> Tensor:
    # All occurrences have inputs of the same layout, sizes that are symbols included.
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


torch.library.register_fake("graphshard::piece", _piece_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::piece_grad", _piece_grad_fake, lib=_LIBRARY)
