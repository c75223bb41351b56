"""What one kernel writes at once, and what has to wait for it: by hand, and against Inductor."""

import pytest
import torch
from graphs import Sketch, live_bytes
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from bench.peaks import step_peaks
from graphshard.graph.program import compute_nodes
from graphshard.pricing.flops import graph_work
from graphshard.pricing.fusion import UNFUSED, Fusion, fusion_of, never_stored

aten = torch.ops.aten


def fused(graph: fx.Graph, starts: tuple[int, ...] = (0,)) -> Fusion:
    return fusion_of(compute_nodes(graph), starts)


def gated(*, through: bool = False) -> Sketch:
    """`hidden`, which the product `weight` reads, is made from what `gradient` reads. through:
    `gradient` needs `weight`."""
    graph = Sketch()
    gate, up, back = (graph.input(name, 8, 8) for name in ("gate", "up", "back"))
    hidden = graph.op(aten.mul.Tensor, gate, up, name="hidden")
    weight = graph.op(aten.mm.default, hidden, back, name="weight")
    other = graph.op(aten.mm.default, weight if through else back, back, name="other")
    gradient = graph.op(aten.mul.Tensor, other, gate, name="gradient")
    last = graph.op(aten.mm.default, gradient, back, name="last")
    graph.done(weight, last)
    return graph


def places(graph: Sketch, starts: tuple[int, ...] = (0,)) -> dict[str, int]:
    return {node.name: place for node, place in fused(graph, starts).delayed.items()}


def test_a_kernel_runs_where_its_last_op_stands() -> None:
    """And `weight`, which reads it, right after."""
    graph = gated()
    assert places(graph) == {"hidden": 3, "weight": 4}
    alone, together = (
        [live.made // 256 for live in live_bytes(graph, frees_inputs=True, fusion=fusion)]
        for fusion in (UNFUSED, fused(graph))
    )
    assert alone == [1, 2, 2, 3, 3]  # hidden is read by weight, which stays; other; gradient; last
    assert together == [0, 0, 1, 3, 4]  # other, then hidden and gradient beside it


def test_what_needs_a_product_is_no_part_of_the_kernel() -> None:
    assert places(gated(through=True)) == {}


def test_a_kernel_ends_with_its_region() -> None:
    assert places(gated(), starts=(0, 3)) == {}


def test_what_all_rows_share_joins_nothing() -> None:
    graph = Sketch()
    x, back, scale = graph.input("x", 8, 8), graph.input("back", 8, 8), graph.input("scale", 8)
    first = graph.op(aten.mul.Tensor, x, scale, name="first")
    graph.op(aten.mm.default, first, back, name="weight")
    second = graph.op(aten.mul.Tensor, back, scale, name="second")
    graph.done(graph.op(aten.mm.default, second, back, name="last"))
    assert places(graph) == {}


def cast_by_scale(*, rows: bool = False) -> Sketch:
    """`hidden` is scaled by the largest number in it (rows: of each row), as for float8."""
    graph = Sketch()
    x, weight = graph.input("x", 8, 8), graph.input("weight", 8, 8)
    doubled = graph.op(aten.mul.Tensor, x, x, name="doubled")
    hidden = graph.op(aten.sigmoid.default, doubled, name="hidden")
    size = graph.op(aten.abs.default, hidden, name="size")
    over = ([-1], True) if rows else ()
    largest = graph.op(aten.amax.default if rows else aten.max.default, size, *over, name="largest")
    scale = graph.op(aten.reciprocal.default, largest, name="scale")
    wide = graph.op(aten.neg.default, hidden, name="wide")
    scaled = graph.op(aten.mul.Tensor, wide, scale, name="scaled")
    graph.done(graph.op(aten.mm.default, scaled, weight, name="product"))
    return graph


def stored(graph: Sketch) -> set[str]:
    nodes = compute_nodes(graph)
    kept = never_stored(nodes, (0,))
    return {node.name for node in nodes if node not in kept}


def test_what_is_scaled_by_its_largest_number_is_stored_for_that() -> None:
    """Nobody knows the number before all is read. Of what it is made of, the last is stored: it is
    written once and read once more; x is read twice by one kernel, and its result is small."""
    graph = cast_by_scale()
    assert stored(graph) == {"hidden", "largest", "scaled", "product"}
    fused = dict(zip(compute_nodes(graph), graph_work(graph, fused_regions=(0,)), strict=True))
    sizes = {node.name: work.bytes for node, work in fused.items() if work.bytes}
    numbers = {"largest": 4, "scale": 4}
    assert sizes == {"doubled": 256, "hidden": 2 * 256, **numbers, "scaled": 256, "product": 768}


def test_what_is_scaled_row_by_row_is_one_kernel() -> None:
    assert stored(cast_by_scale(rows=True)) == {"largest", "scaled", "product"}


def backward(gate: Tensor, up: Tensor, back: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Of a gated layer: gradients of `down`, of what comes before `up` and before `gate`."""
    hidden = torch.sigmoid(gate) * up
    grad_down = back.t() @ hidden
    grad_hidden = back @ down
    grad_up = grad_hidden * torch.sigmoid(gate)
    grad_gate = grad_hidden * up * torch.sigmoid(gate) * (1 - torch.sigmoid(gate))
    return grad_down, grad_up @ down.t(), grad_gate @ down.t()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_holds_as_much_at_once() -> None:
    inputs = [torch.randn(*shape) for shape in ((256, 192), (256, 192), (256, 64), (64, 192))]
    graph = make_fx(backward, tracing_mode="fake")(*inputs).graph
    compiled = torch.compile(backward, fullgraph=True)
    compiled(*inputs)
    measured_bytes = step_peaks(lambda: compiled(*inputs)).allocated_bytes
    one_by_one, together = (
        max(live.made for live in live_bytes(graph, frees_inputs=False, fusion=fusion))
        for fusion in (Fusion(fused(graph).unstored, {}), fused(graph))
    )
    print(measured_bytes, one_by_one, together)
    assert together == pytest.approx(measured_bytes, rel=0.03)
    assert one_by_one < 0.9 * measured_bytes
