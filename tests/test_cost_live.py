"""Bytes alive during each op: by hand, and against the storages of a real run."""

from operator import getitem

import pytest
import torch
from graphs import Sketch, layers, live_bytes
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from toy import Toy, captured, tokens

from graphshard.graph.program import compute_nodes
from graphshard.pricing.fusion import Fusion
from graphshard.pricing.liveness import Live

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")


def test_a_chain_by_hand():
    graph = Sketch()
    x = graph.input("x", 4, 4)
    a = graph.op(aten.relu.default, x)  # 64 bytes, read by the product
    b = graph.op(aten.mm.default, a, graph.op(aten.t.default, a))
    c = graph.op(aten.sum.default, b)  # 4 bytes, returned
    graph.done(c)
    assert live_bytes(graph, frees_inputs=True) == (
        Live(64, 64, 0), Live(0, 64, 0), Live(0, 128, 0), Live(0, 68, 0),
    )  # fmt: skip
    assert [live.inputs for live in live_bytes(graph, frees_inputs=False)] == [64] * 4


def test_results_of_one_op_live_apart_and_in_place_ops_add_nothing():
    graph = Sketch()
    x = graph.input("x", 4, 4)
    both = graph.op(aten.max.dim, x, 0)
    values, indices = (
        graph._with_value(graph.call_function(getitem, (both, i)), both.meta["val"][i])
        for i in (0, 1)
    )
    values = graph.op(aten.relu_.default, values)
    out = graph.op(aten.add.Tensor, values, 1.0)
    graph.done(out, indices)
    made = [live.made for live in live_bytes(graph, frees_inputs=True)]
    assert made == [16 + 32, 16 + 32, 16 + 32, 16 + 32, 16 + 16 + 32]


def test_a_kernel_reads_what_its_unstored_results_need_while_it_writes():
    """x -> exp -> mul -> out, of which a compiler makes one kernel: x lives while out is made."""
    graph = Sketch()
    x = graph.input("x", 4, 4)
    inner = graph.op(aten.exp.default, x)
    view = graph.op(aten.view.default, inner, [16])
    out = graph.op(aten.mul.Tensor, view, 2.0)
    after = graph.op(aten.sum.default, out)
    graph.done(after)
    one_by_one = live_bytes(graph, frees_inputs=True)
    assert [live.inputs for live in one_by_one] == [64, 0, 0, 0]
    fused = live_bytes(graph, frees_inputs=True, fusion=Fusion({inner}, {}))
    assert fused == (Live(64, 0, 0), Live(64, 0, 0), Live(64, 64, 0), Live(0, 68, 0))


def test_gradients_are_counted_apart_until_their_reduction():
    backward = layers(2).backward
    names = [n.name for n in compute_nodes(backward.graph)]
    found = dict(zip(names, live_bytes(backward.graph, frees_inputs=True), strict=True))
    assert found["dw1"].grads == 64
    assert found["token1"].grads == 64
    assert found["dx1"].grads == 0


class Watched(fx.Interpreter):
    """Runs a graph and notes the bytes alive during each compute op."""

    def __init__(self, module, inputs):
        super().__init__(module, garbage_collect_values=True)
        self.given = {t.untyped_storage()._cdata for t in inputs}
        self.storages, self.during = {}, {}
        self.counted = set(compute_nodes(module.graph))

    def run_node(self, node):
        result = super().run_node(node)
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.given:
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        if node in self.counted:
            self.during[node] = sum(size for _, size in self.storages.values())
        return result


def test_as_in_a_real_run():
    model, batch = Toy(), tokens(2, 16)
    forward, backward = captured(model, batch)
    for graph in (forward, backward):
        values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
        inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
        for tensor in inputs:
            tensor.zero_()
        run = Watched(fx.GraphModule(model, graph), inputs)
        run.run(*inputs)
        predicted = [live.made for live in live_bytes(graph, frees_inputs=False)]
        assert predicted == list(run.during.values())


def test_what_stays_inside_a_fused_kernel_takes_no_memory():
    graph = Sketch()
    x = graph.input("x")
    shifted = graph.op(aten.add.Tensor, x, 1.0)
    graph.done(graph.relus(shifted, 1))
    alive = live_bytes(graph, frees_inputs=False)
    fused = live_bytes(graph, frees_inputs=False, fusion=Fusion([shifted], {}))
    assert [one.made for one in alive] == [64, 128]
    assert [one.made for one in fused] == [0, 64]
