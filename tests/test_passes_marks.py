"""Passes over marks of parameters, on small programs: duplicates, sums of gradients, casts, views.

What holds before each, after it, and when it does nothing.
"""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import (
    META,
    Sketch,
    after,
    aten,
    cast,
    group,
    layers,
    program,
    split_in_two,
    text,
    texts,
    two_calls,
)
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.passes.drop_duplicates import drop_duplicates
from graphshard.passes.fold_casts import fold_casts
from graphshard.passes.sink_views import sink_views
from graphshard.passes.sum_gradients import sum_gradients
from graphshard.passes.tag_recompute import tag_recompute

HALF = torch.bfloat16


# -- drop_duplicates -----------------------------------------------------------------------


def test_calls_of_one_module_share_the_first_mark():
    made = after(two_calls(), drop_duplicates)
    assert_expected_inline(
        text(made.forward.graph),
        """\
w = unshard(a0, float32, 0)
mm = mm(x, w)
w_1 = unshard(a1, float32, 0)
mm_1 = mm(mm, w_1)
mm_2 = mm(mm_1, w)
return (mm_2)""",
    )


def test_different_parameters_keep_their_marks():
    made = layers(2)
    before = texts(made)
    assert texts(after(made, drop_duplicates)) == before


# -- sum_gradients -------------------------------------------------------------------------


def joint_of_calls(calls, *, summed):
    """Gradients of the parameters `calls`, in this order; one anchor each if not `summed`."""
    graph = Sketch()
    grads = [graph.input(f"g{i}") for i in range(len(calls))]
    anchors = [graph.anchor(0, f"a{i}") for i in range(1 if summed else len(calls))]
    tokens = []
    for i, index in enumerate(calls):
        tokens.append(graph.reduce(grads[i], anchors[0 if summed else i], index, name=f"token{i}"))
        if summed and i:
            tokens = [graph.op(aten.add.Tensor, *tokens)]
    return program(group(0, "weight", "bias"), joint=graph.done(*tokens))


def test_gradients_add_up_in_order_of_arrival():
    made = after(joint_of_calls([0, 0, 0], summed=True), sum_gradients)
    assert_expected_inline(
        text(made.joint.graph),
        """\
add_tensor = add(g0, g1)
add_tensor_1 = add(add_tensor, g2)
token2 = reduce_grad(add_tensor_1, a0, 0)
return (token2)""",
    )


def test_tokens_of_other_parameters_stay_in_the_sum():
    made = after(joint_of_calls([0, 1, 0, 1], summed=True), sum_gradients)
    assert_expected_inline(
        text(made.joint.graph),
        """\
add_tensor = add(g0, g2)
token2 = reduce_grad(add_tensor, a0, 0)
add_tensor_1 = add(g1, g3)
token3 = reduce_grad(add_tensor_1, a0, 1)
add_2 = add(token2, token3)
return (add_2)""",
    )


def test_tokens_that_are_outputs_become_the_last_one():
    made = after(joint_of_calls([0, 1, 0], summed=False), sum_gradients)
    assert_expected_inline(
        text(made.joint.graph),
        """\
token1 = reduce_grad(g1, a1, 1)
add_tensor = add(g0, g2)
token2 = reduce_grad(add_tensor, a2, 0)
return (token2, token1, token2)""",
    )


def test_a_summed_gradient_has_the_value_of_its_addends():
    graph = after(joint_of_calls([0, 0], summed=True), sum_gradients).joint.graph
    total = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    assert total.meta["val"].shape == (4, 4)


def test_one_gradient_each_is_left_alone():
    made = joint_of_calls([0, 1], summed=True)
    before = texts(made)
    assert texts(after(made, sum_gradients)) == before


# -- fold_casts ----------------------------------------------------------------------------


def test_a_cast_of_every_use_moves_into_the_gather():
    graph = Sketch()
    x, anchor = cast(graph, graph.input("x")), graph.anchor(0)
    weight, bias = graph.unshard(anchor, 0), graph.unshard(anchor, 1, name="b")
    y = graph.op(aten.mm.default, x, cast(graph, weight))
    y = graph.op(aten.mm.default, y, cast(graph, weight))
    y = graph.op(aten.add.Tensor, y, bias)
    before = group(0, "weight", "bias")
    made = after(program(before, forward=graph.done(y)), fold_casts)
    assert_expected_inline(
        text(made.forward.graph),
        """\
_to_copy = _to_copy(x)
w = unshard(a0, bfloat16, 0)
b = unshard(a0, float32, 1)
mm = mm(_to_copy, w)
mm_1 = mm(mm, w)
add = add(mm_1, b)
return (add)""",
    )
    assert weight.meta["val"].dtype is HALF
    assert [p.dtype for p in made.groups[0].params] == ["bfloat16", "float32"]
    assert [p.gathered_bytes for p in made.groups[0].params] == [32, 64]
    assert made.groups[0].gathered_bytes == 96


def uncast_use(graph, weight):
    return graph.op(aten.mm.default, cast(graph, weight), cast(graph, graph.relus(weight, 1)))


def two_dtypes(graph, weight):
    return graph.op(aten.add.Tensor, cast(graph, weight), cast(graph, weight, torch.float16))


def wider(graph, weight):
    return cast(graph, weight, torch.float64)


def to_integers(graph, weight):
    return cast(graph, weight, torch.int8)


def more_than_a_cast(graph, weight):
    return graph.op(aten._to_copy.default, weight, dtype=HALF, device=META)


@pytest.mark.parametrize(
    "use", [uncast_use, two_dtypes, wider, to_integers, more_than_a_cast], ids=lambda f: f.__name__
)
def test_other_uses_keep_the_gather_as_it_is(use):
    graph = Sketch()
    made = program(forward=graph.done(use(graph, graph.unshard(graph.anchor(0)))))
    before, groups = texts(made), made.groups
    made = after(made, fold_casts)
    assert texts(made) == before
    assert made.groups == groups


# -- tag_recompute -------------------------------------------------------------------------


def recomputed(made):
    return [n.name for n in made.joint.graph.nodes if "recompute" in n.meta]


def test_marks_and_their_views_and_casts_are_recomputed():
    graph = Sketch()
    x = graph.input("x")
    weight = graph.unshard(graph.anchor(0))
    turned = graph.op(aten.t.default, cast(graph, graph.op(aten.view.default, weight, [4, 4])))
    y = graph.op(aten.mm.default, cast(graph, x, HALF), turned)
    made = after(program(joint=graph.done(graph.op(aten.t.default, y))), tag_recompute)
    assert recomputed(made) == ["w", "view", "_to_copy", "t"]
    assert weight.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_parameters_come_after_every_region_of_activation_checkpointing():
    """Or torch's partition would save them where a region reads what an earlier one made."""
    graph = Sketch()
    weight = graph.unshard(graph.anchor(0))
    weight.meta["ac_graph_id"] = 3
    after(program(joint=graph.done(graph.relus(weight, 1))), tag_recompute)
    assert weight.meta["ac_graph_id"] > 1_000_000


def test_the_parts_of_a_split_parameter_are_recomputed():
    graph = Sketch()
    made = program(joint=graph.done(split_in_two(graph, graph.unshard(graph.anchor(0)))))
    assert recomputed(after(made, tag_recompute)) == ["w", "split", "part", "part_1"]


def test_nothing_is_recomputed_without_backward():
    made = after(two_calls(), drop_duplicates, tag_recompute)
    assert not any("recompute" in n.meta for n in made.forward.graph.nodes)


# -- sink_views ----------------------------------------------------------------------------


def test_marks_and_views_move_down_to_their_first_use():
    made = layers(2)
    graph = made.forward.graph
    marks_on_top(graph)
    assert_expected_inline(
        text(graph),
        """\
w0 = unshard(a0, float32, 0)
w1 = unshard(a1, float32, 0)
t = t(w0)
t_1 = t(w1)
mm = mm(x, t)
relu = relu(mm)
mm_1 = mm(relu, t_1)
relu_1 = relu(mm_1)
return (relu_1, x, relu, a0, a1)""",
    )
    after(made, sink_views)
    assert_expected_inline(
        text(graph),
        """\
w0 = unshard(a0, float32, 0)
t = t(w0)
mm = mm(x, t)
relu = relu(mm)
w1 = unshard(a1, float32, 0)
t_1 = t(w1)
mm_1 = mm(relu, t_1)
relu_1 = relu(mm_1)
return (relu_1, x, relu, a0, a1)""",
    )


def marks_on_top(graph):
    """As the partition may leave them."""
    first = next(n for n in graph.nodes if n.name == "mm")
    for name in ("w0", "w1", "t", "t_1"):
        first.prepend(next(n for n in graph.nodes if n.name == name))


def test_marks_that_nothing_uses_are_dropped():
    graph = Sketch()
    y = graph.relus(graph.input("x"), 1)
    graph.unshard(graph.anchor(0))
    made = after(program(forward=graph.done(y)), sink_views)
    assert text(made.forward.graph) == "relu = relu(x)\nreturn (relu)"


def test_views_in_place_stay_in_place():
    made = after(layers(2), sink_views)
    before = texts(made)
    assert texts(after(made, sink_views)) == before
