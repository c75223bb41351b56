"""Flops and bytes of real captured graphs, and ops that nobody knows."""

import operator
from dataclasses import replace

import pytest
import torch
from graphs import Sketch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from toy import Toy, captured, tokens

from graphshard.cost.roofline import FREE, Attention, Kernel, OpWork
from graphshard.cost.symbolic import BATCH, LENGTH, formula
from graphshard.graph.program import compute_nodes
from graphshard.pricing.flops import graph_work, total_work
from graphshard.runtime.recurrent import RECURRENT, RECURRENT_BACKWARD

aten = torch.ops.aten
# The CPU's attention, which torch's own table lacks: what it is elsewhere.
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ].__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ].__wrapped__,
}


def eager_flops(model, batch):
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(batch).backward()
    return counter.get_total_flops()


def flops(graphs, **options):
    return sum(total_work(graph_work(g, **options), 0, len(g.nodes))[0] for g in graphs)


pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")


def test_flops_of_a_training_step_are_those_of_an_eager_one():
    model, batch = Toy(), tokens(2, 16)
    graphs = captured(model, batch)
    assert len(graphs) == 2
    assert flops(graphs) == eager_flops(model, batch) > 0
    unknown = [total_work(graph_work(g), 0, len(g.nodes))[2] for g in graphs]
    assert unknown == [0, 0]


def test_flops_of_a_fake_capture():
    model, batch = Toy(), tokens(2, 16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(lambda t: model(t))(mode.from_tensor(batch)).graph
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(batch)
    assert flops([graph]) == counter.get_total_flops()


def test_symbolic_sizes_count_by_hints_or_stay_symbols():
    model, batch = Toy(), tokens(3, 24)
    graphs = captured(model, batch, dynamic=True)
    assert flops(graphs) == eager_flops(model, batch)
    first = graphs[0].find_nodes(op="placeholder")
    shape = next(
        n.meta["val"].shape
        for n in first
        if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dtype == torch.int64
    )
    names = [str(size.node.expr) for size in shape]
    found = formula(flops(graphs, symbols=dict(zip(names, (BATCH, LENGTH), strict=True))))
    assert found.free_symbols == ("B", "S")
    for size in ((3, 24), (2, 16), (5, 40)):
        expected = eager_flops(model, tokens(*size))
        assert found.evaluate(B=size[0], S=size[1]) == expected


def test_counting_leaves_no_guards_behind():
    graphs = captured(Toy(), tokens(3, 24), dynamic=True)
    value = next(
        n.meta["val"] for n in graphs[0].nodes if getattr(n.meta.get("val"), "fake_mode", None)
    )
    guards = len(value.fake_mode.shape_env.guards)
    flops(graphs)
    assert len(value.fake_mode.shape_env.guards) == guards


def op_costs():
    graph = Sketch()
    return graph, graph.input("x", 4, 8), graph.input("w", 8, 16)


def works(graph, *outputs, **options):
    graph.done(*outputs)
    found = graph_work(graph, **options)
    assert len(found) == len(compute_nodes(graph))
    return found


def test_a_product_by_hand():
    graph, x, w = op_costs()
    bytes_ = 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert works(graph, graph.op(aten.mm.default, x, w)) == (OpWork(2 * 4 * 8 * 16, bytes_),)


def test_views_items_and_empty_tensors_are_free():
    graph, x, w = op_costs()
    turned = graph.op(aten.t.default, w)
    parts = graph.op(aten.split.Tensor, turned, 8)
    item = graph._with_value(
        graph.call_function(operator.getitem, (parts, 0)), torch.empty(8, 8, device="meta")
    )
    empty = graph.op(aten.empty.memory_format, [4, 4], device="meta")
    flat = graph.op(aten._unsafe_view.default, x, [32])
    assert works(graph, item, empty, flat) == (FREE,) * 5


def test_an_input_counts_once_and_an_expanded_one_as_stored():
    graph, x, _ = op_costs()
    row = graph.op(aten.expand.default, graph.op(aten.select.int, x, 0, 0), [4, 8])
    total = graph.op(aten.add.Tensor, row, row)
    assert works(graph, total)[-1] == OpWork(0, 4 * 8 + 4 * 32)


def test_a_lookup_reads_what_it_yields():
    graph = Sketch()
    table, index = graph.input("table", 1000, 8), graph.input("index", 4)
    index.meta["val"] = torch.empty(4, dtype=torch.int64, device="meta")
    found = works(graph, graph.op(aten.embedding.default, table, index))
    assert found == (OpWork(0, 4 * 32 + 8 * 4 + 4 * 32),)


def test_marks_are_free():
    graph = Sketch()
    anchor = graph.anchor(0)
    weight = graph.unshard(anchor)
    token = graph.reduce(graph.op(aten.relu.default, weight), anchor)
    assert works(graph, token) == (FREE, OpWork(0, 2 * 4 * 16), FREE)


def test_fused_results_stay_out_of_memory():
    graph, x, w = op_costs()
    product = graph.op(aten.mm.default, x, w)
    shifted = graph.op(aten.add.Tensor, product, 1.0)
    active = graph.op(aten.relu.default, shifted)
    total = graph.op(aten.sum.default, active)
    size = 4 * 4 * 16
    mm, *fused = works(graph, total, fused_regions=[0])
    assert mm.launches == 1
    kept = OpWork(0, 4, kernel=Kernel.FUSED)
    assert fused == [
        replace(kept, bytes=size, launches=0),
        replace(kept, bytes=0, launches=0),
        kept,
    ]


def test_a_cast_is_a_kernel_of_its_own_unless_it_is_fused():
    def cast_and_more():
        graph, x, _ = op_costs()
        cast = graph.op(aten._to_copy.default, x, dtype=torch.bfloat16)
        return graph, graph.op(aten.relu.default, cast)

    assert [work.kernel for work in works(*cast_and_more())] == [Kernel.CAST, Kernel.COPY]
    cast, _ = works(*cast_and_more(), fused_regions=[0])
    assert cast == OpWork(0, 4 * 32, launches=0, kernel=Kernel.FUSED)
    graph, x, _ = op_costs()
    copy = graph.op(aten._to_copy.default, x, dtype=torch.int32)  # of the same size
    assert works(graph, copy)[0].kernel is Kernel.COPY


def test_a_normalisation_is_a_kernel_of_its_own():
    with FakeTensorMode():
        graph = make_fx(lambda x: functional.layer_norm(x, (8,)))(torch.empty(4, 8)).graph
    assert graph_work(graph)[0].kernel is Kernel.NORM


@pytest.mark.parametrize("causal", [False, True])
def test_an_attention_says_what_it_is(causal):
    def loss(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()

    def grads(*heads):
        return torch.autograd.grad(loss(*heads), heads)

    with FakeTensorMode():
        heads = [torch.empty(2, 4, n, 16, requires_grad=True) for n in (32, 64, 64)]
        graph = make_fx(grads)(*heads).graph
    found = [work.attention for work in graph_work(graph) if work.attention is not None]
    forward = Attention(16, 64, causal)
    assert found == [forward, replace(forward, backward=True)]


def test_fusion_ends_where_a_region_ends():
    graph, x, _ = op_costs()
    shifted = graph.op(aten.add.Tensor, x, 1.0)
    active = graph.op(aten.relu.default, graph.op(aten.view.default, shifted, [32]))
    assert [w.launches for w in works(graph, active, fused_regions=[0, 1])] == [1, 0, 1]


def experts(x, weights, offsets):
    """Products of groups of rows, forward and backward."""
    out = functional.grouped_mm(x, weights, offs=offsets)
    return torch.autograd.grad(out, (x, weights), torch.ones_like(out))


def test_products_of_groups_count_as_products_one_by_one():
    def sized(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)

    x, weights = sized(48, 32), sized(4, 32, 64)
    offsets = torch.tensor([16, 16, 40, 48])
    grouped = make_fx(experts)(x, weights, offsets.int()).graph
    with FlopCounterMode(display=False) as one_by_one:
        rows = x.tensor_split(offsets[:-1])
        out = torch.cat([part @ w for part, w in zip(rows, weights, strict=True)])
        torch.autograd.grad(out, (x, weights), torch.ones_like(out))
    assert one_by_one.get_total_flops() == 3 * 2 * 48 * 32 * 64
    assert sum(work.flops for work in graph_work(grouped)) == one_by_one.get_total_flops()


@pytest.mark.parametrize(
    ("left", "right", "products"),
    [((4, 8, 16), (4, 16, 32), 4 * 8 * 16 * 32), ((4, 8, 16), (16, 64), 8 * 16 * 64)],
    ids=["pairs", "columns"],
)
def test_products_of_pairs_and_of_groups_of_columns(left, right, products):
    def run(a, b, offsets):
        return aten._grouped_mm.default(a, b, None if len(left) == len(right) else offsets)

    sized = [torch.zeros(shape, dtype=torch.bfloat16) for shape in (left, right)]
    offsets = torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    grouped = make_fx(run)(*sized, offsets).graph
    assert [work.flops for work in graph_work(grouped)] == [2 * products]


@torch.library.custom_op("graphshard_test::twist", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@twist.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_custom_op_counts_bytes_and_is_unknown():
    graph, x, _ = op_costs()
    out = graph.op(torch.ops.graphshard_test.twist.default, x, name="twist")
    found = works(graph, out)
    assert found == (OpWork(0, 2 * 4 * 32, known=False),)
    assert total_work(found, 0, 1) == (0, 256, 1)


def test_values_that_make_no_sense_do_not_stop_anything():
    graph, x, w = op_costs()
    product = graph.op(aten.mm.default, x, w)
    product.meta.clear()
    lost = graph.call_function(torch.ops.aten.relu.default, (product,))
    found = works(graph, lost)
    assert not found[0].known
    assert total_work(found, 0, 2)[2] >= 1


@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_modules_are_counted_as_torch_counts_their_products(bidirectional):
    module = nn.GRU(6, 5, 2, bidirectional=bidirectional)
    x, states = torch.randn(4, 3, 6), torch.zeros(4 if bidirectional else 2, 3, 5)
    weights = list(module._flat_weights)
    settings = ("GRU", True, 2, 0.0, True, bidirectional)
    trained = [True] * (2 + len(weights))
    grads = [torch.ones(4, 3, 10 if bidirectional else 5), None]

    def forward(x, states, weights):
        return RECURRENT(x, [states], weights, *settings, trained, True)[0]

    def backward(x, states, weights):
        none = torch.empty(0, dtype=torch.uint8)
        return RECURRENT_BACKWARD(grads, none, x, [states], weights, *settings, trained)

    with FlopCounterMode(display=False) as once:
        output, _ = module(x.requires_grad_(), states.requires_grad_())
    with FlopCounterMode(display=False) as again:
        output.sum().backward()
    counts = [
        total_work(graph_work(make_fx(run)(x, states, weights).graph), 0, None)[0]
        for run in (forward, backward)
    ]
    assert counts == [
        once.get_total_flops(),
        once.get_total_flops() + again.get_total_flops(),
    ]
