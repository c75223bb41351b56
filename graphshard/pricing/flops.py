"""What each op of a captured graph does: flops, bytes, dtype.

In: an FX graph of ATen ops with fake-tensor values in `node.meta["val"]`. Out: one `Work` for each
compute node, in compute order. Flops are those of torch.utils.flop_counter (a multiply-add counts
as two). Nothing here raises for an op that it does not know: such an op counts its bytes.

Sizes that are symbols count with their hints, or stay symbols if `symbols` names them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, shape_wrapper

from graphshard.cost.algebra import Quantity, least
from graphshard.cost.comm import Collective, CollectiveKind
from graphshard.cost.roofline import FREE, Attention, Kernel, OpWork
from graphshard.graph.collectives import FUNCTIONAL, WAIT, ranks_of
from graphshard.graph.program import CASTS, compute_nodes, is_reduce, is_unshard, is_view
from graphshard.graph.random_ops import argument_of, packet_of, wrapped_op
from graphshard.pricing.fusion import fused_traffic, is_fusible
from graphshard.pricing.sizes import Sizes, dtype_name
from graphshard.runtime.recurrent import RECURRENT, RECURRENT_BACKWARD

aten = torch.ops.aten

# They take memory or give it another shape, and touch none.
_NO_TRAFFIC = (aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)
# They read as much of their first argument as they yield.
_LOOKUPS = (aten.embedding, aten.index, aten.index_select, aten.gather)
# torch's registry lacks the CPU's attention; it does what these do.
_SAME_FLOPS = (
    (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_flash_attention_backward,
    ),
)
# Others (all-to-all) count their bytes.
_COLLECTIVES = {
    FUNCTIONAL.all_reduce: CollectiveKind.ALL_REDUCE,
    FUNCTIONAL.all_gather_into_tensor: CollectiveKind.ALL_GATHER,
    FUNCTIONAL.reduce_scatter_tensor: CollectiveKind.REDUCE_SCATTER,
    FUNCTIONAL.broadcast: CollectiveKind.BROADCAST,
}
_OWN_NAMESPACES = ("aten", "prims")
# Each one kernel, forward or backward.
_NORMS = (
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
)


def _grouped_flops(left: Sequence[int], right: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Of products of groups: rows, columns or the summed dimension of a matrix are shared out
    among the groups, or every group has two matrices of its own."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _recurrent_flops(
    input: Sequence[int], states: Any, weights: Sequence[Sequence[int]], *args: Any, **kwargs: Any
) -> int:
    """Each matrix of weights is used once for each row and place of the input."""
    return sum(2 * input[0] * input[1] * w[0] * w[1] for w in weights if len(w) == 2)


def _recurrent_backward_flops(
    grads: Any, random_state: Any, input: Any, *args: Any, **kwargs: Any
) -> int:
    """Forward once more, then two products for each of its own."""
    return 3 * _recurrent_flops(input, *args, **kwargs)


# torch's registry lacks products of groups (a mixture of experts), and does not know our ops.
_OWN_FLOPS = {
    aten._grouped_mm: shape_wrapper(_grouped_flops),
    aten._scaled_grouped_mm: shape_wrapper(_grouped_flops),
    RECURRENT.overloadpacket: shape_wrapper(_recurrent_flops),
    RECURRENT_BACKWARD.overloadpacket: shape_wrapper(_recurrent_backward_flops),
}


def graph_work(
    graph: fx.Graph,
    *,
    symbols: Mapping[str, Any] | None = None,
    fused_regions: Collection[int] | None = None,
) -> tuple[OpWork, ...]:
    """The work of `graphshard.graph.program.compute_nodes(graph)`, in that order.

    symbols: sympy expressions for the graph's size symbols by name, such as {"s77": LENGTH};
    without it every size is a number.
    fused_regions: None if ops run one by one. Else the starts of the regions that a compiler fuses:
    the result of a pointwise op stays out of memory if only pointwise ops and reductions of the
    same region read it, or is written and read once (`fused_traffic`).
    """
    nodes = compute_nodes(graph)
    fused = {} if fused_regions is None else fused_traffic(nodes, fused_regions)
    sizes = Sizes(symbols)
    works = (_work(node, fused, sizes) for node in nodes)
    if fused_regions is None:
        return tuple(works)
    return tuple(
        replace(work, kernel=Kernel.FUSED) if is_fusible(node) else work
        for node, work in zip(nodes, works, strict=True)
    )


def total_work(works: Sequence[OpWork], start: int, stop: int) -> tuple[Quantity, Quantity, int]:
    """Flops, bytes and number of unknown ops of the compute ops [start, stop)."""
    part = works[start:stop]
    return sum(w.flops for w in part), sum(w.bytes for w in part), sum(not w.known for w in part)


def _work(node: fx.Node, fused: Mapping[fx.Node, int], sizes: Sizes) -> OpWork:
    """fused: how often such a result goes to or from memory, all its readers together."""
    try:
        if _is_free(node):
            return FREE
        if (collective := _collective(node, sizes)) is not None:
            return replace(FREE, collective=collective)
        flops, known = _flops(node, sizes)
        return OpWork(
            flops,
            _bytes(node, fused, sizes),
            _dtype(node),
            int(fused.get(node, 1) > 0),
            known,
            attention=_attention(node, sizes),
            kernel=_kernel(node),
        )
    except Exception:  # a custom op's value or a formula may be anything; costs must not stop a run
        return replace(FREE, launches=1, known=False)


def _collective(node: fx.Node, sizes: Sizes) -> Collective | None:
    """One of the model's own, of a kind that has a price and among ranks that are known."""
    kind, ranks = _COLLECTIVES.get(packet_of(node)), ranks_of(node)
    if kind is None or not ranks:
        return None
    # The size of the whole: what a reduce-scatter reads, and what the others yield.
    source = node.all_input_nodes[0] if kind is CollectiveKind.REDUCE_SCATTER else node
    return Collective(kind, ranks, sum(sizes.bytes(t) for t in _tensors(source)))


def _attention(node: fx.Node, sizes: Sizes) -> Attention | None:
    name = str(packet_of(node))
    if "scaled_dot_product" not in name:
        return None
    key = sizes.shape(argument_of(node, "key").meta["val"])
    return Attention(key[-1], key[-2], argument_of(node, "is_causal") is True, "backward" in name)


def _kernel(node: fx.Node) -> Kernel:
    packet = packet_of(node)
    if packet in _NORMS:
        return Kernel.NORM
    widths = {t.dtype.itemsize for each in (node, *node.all_input_nodes) for t in _tensors(each)}
    return Kernel.CAST if node.target in CASTS and len(widths) > 1 else Kernel.COPY


def _is_free(node: fx.Node) -> bool:
    if is_view(node) or is_unshard(node) or is_reduce(node) or node.target is operator.getitem:
        return True
    if node.target is WAIT:
        return True
    # Arithmetic on sizes.
    touches = [node, *node.all_input_nodes]
    return packet_of(node) in _NO_TRAFFIC or not any(map(_has_tensor, touches))


def _formula(node: fx.Node) -> Any:
    """torch's, our own where it has none, or None."""
    packet = packet_of(node)
    return flop_registry.get(dict(_SAME_FLOPS).get(packet, packet), _OWN_FLOPS.get(packet))


def _flops(node: fx.Node, sizes: Sizes) -> tuple[Quantity, bool]:
    """Flops, and whether they are known. Pointwise ops and reductions are bound by memory: 0."""
    formula = _formula(node)
    if formula is None:
        return 0, getattr(wrapped_op(node)[0], "namespace", None) in _OWN_NAMESPACES
    # Most formulas take shapes; those that torch registers with `get_raw` look into tensors.
    wants_shapes = hasattr(formula, "__wrapped__")
    read = sizes.shape if wants_shapes else _same
    op, given = wrapped_op(node)
    is_wrapped = op is not node.target
    options = {} if is_wrapped else node.kwargs
    args, kwargs = map_arg((given, options), lambda n: read(n.meta["val"]))
    # What a wrapper yields need not be what its op does; no op that torch wraps is priced by that.
    result = None if is_wrapped else read(node.meta["val"])
    return sizes.quantity(formula(*args, **kwargs, out_val=result)), True


def _bytes(node: fx.Node, fused: Mapping[fx.Node, int], sizes: Sizes) -> Quantity:
    """Bytes read and written: each input once, each output once."""
    written = fused.get(node, 1) * sum(sizes.bytes(t) for t in _tensors(node))
    read = [
        sum(sizes.bytes(t) for t in _tensors(source))
        for source in node.all_input_nodes
        if _origin(source) not in fused
    ]
    if packet_of(node) in _LOOKUPS and read:
        read[0] = least(read[0], sum(sizes.bytes(t) for t in _tensors(node)))
    return sum(read) + written


def _dtype(node: fx.Node) -> str:
    """The dtype that arithmetic runs in: that of the first floating-point input."""
    tensors = [t for source in node.all_input_nodes for t in _tensors(source)] or [*_tensors(node)]
    tensor = next((t for t in tensors if t.dtype.is_floating_point), tensors[0])
    return dtype_name(tensor.dtype, tensor.device)


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _has_tensor(node: fx.Node) -> bool:
    return next(_tensors(node), None) is not None


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return (v for v in values if isinstance(v, Tensor))


def _same(value: Any) -> Any:
    return value
