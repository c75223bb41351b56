"""With `compute="aten"` the ops that are traced are those that eager torch runs."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.codegen.aten import IN_PYTHON_TOO, WITH_SIZES, as_eager, emit_ops

PRODUCTS = ("mm", "mv", "dot")  # addmm, bmm, ...


class Noted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def products(ops):
    return [op for op in map(str, ops) if any(word in op for word in PRODUCTS)]


def traced(call, inputs):
    """What runs forward, of the graph that AOTAutograd makes."""
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=kept)
    with as_eager():
        torch.compile(call, backend=backend, dynamic=False)(*inputs)
    return [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]


@st.composite
def laid_out(draw, shape):
    """A tensor of this shape whose dims lie in any order, some with gaps between."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from((1, 1, 2))) for _ in order]
    whole = torch.zeros([shape[dim] * gap for dim, gap in zip(order, gaps, strict=True)])
    part = whole[tuple(slice(shape[dim]) for dim in order)]
    return part.permute([order.index(dim) for dim in range(len(shape))]).requires_grad_(
        draw(st.booleans())
    )


@st.composite
def multiplied(draw):
    small = st.sampled_from((1, 2, 3))
    inner = draw(st.sampled_from((1, 4)))
    one = (*draw(st.lists(small, max_size=3)), inner)
    if draw(st.booleans()):
        weight = draw(laid_out((5, inner)))
        return partial(F.linear, bias=torch.zeros(5)), (draw(laid_out(one)), weight)
    other = (inner, draw(small)) if len(one) > 1 or draw(st.booleans()) else (2, inner, 3)
    return torch.matmul, (draw(laid_out(one)), draw(laid_out(other)))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(multiplied())
def test_products_are_those_of_eager_torch(case):
    call, inputs = case
    with Noted() as noted:
        call(*inputs)
    assert products(traced(call, inputs)) == products(noted.ops)


def test_torchs_own_rule_is_another():
    """Where it is not, `as_eager` has nothing left to do. A slice between blocks, frozen weight."""
    x, weight = torch.zeros(2, 3, 4, 8)[:, :, 1], torch.zeros(5, 8)
    traced_here = products(traced(torch.matmul, (x, weight.T)))
    graphs = []
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(graph) or graph)
    torch.compile(torch.matmul, backend=backend)(x, weight.T)
    plain = products(node.target for node in graphs[0].graph.nodes)
    assert (traced_here, plain) == (["aten.mm.default"], ["aten.bmm.default"])


def run_as_is(graph, inputs):
    return make_boxed_func(graph.forward)


def test_a_view_copies_what_lies_otherwise_than_traced():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.ops.aten.view.default, (x, [8, 3]))])
    run = emit_ops(fx.GraphModule({}, graph))
    whole = torch.randn(2, 4, 3)
    (shown,) = run([whole])
    assert shown.data_ptr() == whole.data_ptr()
    turned = torch.randn(2, 3, 4).transpose(1, 2)
    (copied,) = run([turned])
    assert torch.equal(copied, turned.reshape(8, 3))


def interpolated(mode, **kwargs):
    return lambda x: F.interpolate(x, mode=mode, **kwargs)


OTHER_KERNELS = {
    "linear": (interpolated("linear", scale_factor=2.3), (2, 3, 11)),
    "bilinear": (interpolated("bilinear", scale_factor=2.3), (2, 3, 7, 5)),
    "bilinear-size": (interpolated("bilinear", size=(4, 9), align_corners=True), (2, 3, 7, 5)),
    "bicubic": (interpolated("bicubic", scale_factor=(2, 1.5)), (2, 3, 7, 5)),
    "trilinear": (interpolated("trilinear", scale_factor=2), (1, 2, 4, 5, 3)),
    "nearest": (interpolated("nearest", scale_factor=1.7), (2, 3, 7, 5)),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, torch.tensor([1, 2, 0])), (3, 5)),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 2, -1, 0, 0]] * 3)),
        (3, 5),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_kernels_are_those_of_eager_torch(name, dynamic):
    """With those that torch traces the last bits differ: with symbolic sizes they do."""
    call, shape = OTHER_KERNELS[name]
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run_as_is)
    before = {op: dict(op.py_kernels) for op in (*IN_PYTHON_TOO, *WITH_SIZES)}
    with as_eager():
        compiled = torch.compile(call, backend=backend, dynamic=dynamic)
        for rows in (shape[0], shape[0] + dynamic * ("loss" not in name)):
            x = torch.randn(rows, *shape[1:], generator=torch.Generator().manual_seed(0))
            found = []
            for run in (call, compiled):
                given = x.clone().requires_grad_()
                out = run(given)
                out.square().sum().backward()
                found.append((out.detach(), given.grad))
            same = partial(torch.allclose, atol=1e-4) if dynamic else torch.equal
            assert all(map(same, *found))
    assert before == {op: dict(op.py_kernels) for op in before}
