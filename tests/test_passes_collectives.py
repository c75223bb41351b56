"""Passes that insert gathers, releases and reductions, on small programs.

What holds before each, after it, and when it does nothing.
"""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import (
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

from graphshard.codegen.emit import with_run_input
from graphshard.errors import CaptureError
from graphshard.graph.marks import REDUCE_GRAD
from graphshard.graph.program import Program, output_node, steps
from graphshard.passes.drop_duplicates import drop_duplicates
from graphshard.passes.fold_casts import fold_casts
from graphshard.passes.insert_gathers import insert_gathers
from graphshard.passes.insert_reductions import insert_reductions
from graphshard.passes.insert_releases import insert_releases
from graphshard.passes.pin_meshes import pin_meshes
from graphshard.passes.sink_views import sink_views
from graphshard.passes.sum_gradients import sum_gradients
from graphshard.schedule.plan import StepKind

# -- insert_gathers ------------------------------------------------------------------------


def test_a_group_is_gathered_once_before_its_first_use():
    graph = Sketch()
    graph.placeholder("run")
    x, a0, a1 = graph.input("x"), graph.anchor(0), graph.anchor(1)
    y = graph.op(aten.mm.default, x, graph.unshard(a1, name="v"))
    weight, bias = graph.unshard(a0, 2), graph.unshard(a0, 0, name="b")
    y = graph.op(aten.mm.default, graph.op(aten.add.Tensor, y, bias), weight)
    groups = group(0, "bias", "unused", "weight"), group(1)
    made = after(program(*groups, forward=graph.done(y)), sink_views, insert_gathers)
    assert_expected_inline(
        text(made.forward.graph),
        """\
group_layers_1 = run.open(a1, float32)
gather_layers_1 = run.issue_gather(group_layers_1)
params_layers_1 = gather_layers_1.wait(group_layers_1)
layers_1_weight = params_layers_1[0]
mm = mm(x, layers_1_weight)
group_layers_0 = run.open(a0, float32)
gather_layers_0 = run.issue_gather(group_layers_0)
params_layers_0 = gather_layers_0.wait(group_layers_0)
layers_0_bias = params_layers_0[0]
layers_0_weight = params_layers_0[2]
add = add(mm, layers_0_bias)
mm_1 = mm(add, layers_0_weight)
return (mm_1)""",
    )


def test_parameters_of_several_dtypes_travel_in_their_own():
    graph = Sketch()
    graph.placeholder("run")
    weight = graph.unshard(graph.anchor(0), 1)
    y = graph.relus(cast(graph, weight), 1)
    made = program(group(0, "bias", "weight"), forward=graph.done(y))
    made = after(made, fold_casts, insert_gathers)
    issue, _ = next(steps(made.forward.graph, StepKind.GATHER_ISSUE))
    assert issue.args[1].args[2:] == (torch.float32, torch.bfloat16)


def test_gathered_parameters_keep_the_value_and_get_the_name():
    made = after(layers(1), insert_gathers)
    item = next(n for n in made.forward.graph.nodes if n.name == "layers_0_weight")
    assert item.meta["val"].shape == (4, 4)


def test_no_mark_no_gather():
    graph = Sketch()
    graph.placeholder("run")
    made = program(forward=graph.done(graph.relus(graph.input("x"), 2)))
    before = texts(made)
    assert texts(after(made, sink_views, insert_gathers, insert_releases)) == before


# -- insert_releases -----------------------------------------------------------------------


def test_groups_are_released_after_the_last_reader_of_a_view():
    made = after(layers(2), sink_views, insert_gathers, insert_releases)
    assert_expected_inline(
        "\n\n".join(texts(made)),
        """\
group_layers_0 = run.open(a0, float32)
gather_layers_0 = run.issue_gather(group_layers_0)
params_layers_0 = gather_layers_0.wait(group_layers_0)
layers_0_weight = params_layers_0[0]
t = t(layers_0_weight)
mm = mm(x, t)
release_layers_0 = group_layers_0.release_for_backward()
relu = relu(mm)
group_layers_1 = run.open(a1, float32)
gather_layers_1 = run.issue_gather(group_layers_1)
params_layers_1 = gather_layers_1.wait(group_layers_1)
layers_1_weight = params_layers_1[0]
t_1 = t(layers_1_weight)
mm_1 = mm(relu, t_1)
release_layers_1 = group_layers_1.release_for_backward()
relu_1 = relu(mm_1)
return (relu_1, x, relu, a0, a1)

t = t(tangents_1)
dw1 = mm(t, x1)
token1 = reduce_grad(dw1, a1, 0)
group_layers_1 = run.open(a1, float32)
gather_layers_1 = run.issue_gather(group_layers_1)
params_layers_1 = gather_layers_1.wait(group_layers_1)
layers_1_weight = params_layers_1[0]
dx1 = mm(tangents_1, layers_1_weight)
release_layers_1 = group_layers_1.release()
t_1 = t(dx1)
dw0 = mm(t_1, x0)
token0 = reduce_grad(dw0, a0, 0)
group_layers_0 = run.open(a0, float32)
gather_layers_0 = run.issue_gather(group_layers_0)
params_layers_0 = gather_layers_0.wait(group_layers_0)
layers_0_weight = params_layers_0[0]
dx0 = mm(dx1, layers_0_weight)
release_layers_0 = group_layers_0.release()
return (dx0, token0, token1)""",
    )


def test_a_group_that_backward_does_not_need_is_released_for_good():
    made = layers(2)
    graph = made.backward.graph
    dx0 = next(n for n in graph.nodes if n.name == "dx0")
    dx0.replace_all_uses_with(dx0.args[0])
    graph.erase_node(dx0)
    made = after(made, sink_views, insert_gathers, insert_releases)
    assert methods(made.forward.graph) == {0: "release", 1: "release_for_backward"}
    assert methods(made.backward.graph) == {1: "release"}


def test_without_backward_every_release_is_for_good():
    made = after(two_calls(), drop_duplicates, insert_gathers, insert_releases)
    assert methods(made.forward.graph) == {0: "release", 1: "release"}


def test_a_split_parameter_is_released_after_the_last_reader_of_a_part():
    graph = Sketch()
    graph.placeholder("run")
    made = program(forward=graph.done(split_in_two(graph, graph.unshard(graph.anchor(0)))))
    after(made, sink_views, insert_gathers, insert_releases)
    names = [n.name for n in graph.nodes]
    assert names.index("mul") < names.index("release_layers_0")


@pytest.mark.parametrize("name", ["w0", "t"])
def test_what_an_output_aliases_is_not_released(name):
    made = layers(2)
    out = output_node(made.forward.graph)
    escaping = next(n for n in made.forward.graph.nodes if n.name == name)
    out.args = ((escaping, *out.args[0][1:]),)
    made = after(made, sink_views, insert_gathers, insert_releases)
    assert methods(made.forward.graph) == {1: "release_for_backward"}
    assert methods(made.backward.graph) == {0: "release", 1: "release"}


def methods(graph):
    """Group -> the method that releases it."""
    return {step.group: node.target for node, step in steps(graph, StepKind.RELEASE)}


# -- insert_reductions ---------------------------------------------------------------------


def backward_of(*arrivals, tangents=1):
    """A backward graph; `arrivals` are (group, index, tangents that the gradient needs)."""
    graph = Sketch()
    graph.placeholder("run")
    anchors = [graph.anchor(i) for i in range(2)]
    given = [graph.input(f"tangents_{i + 1}") for i in range(tangents)]
    saved = graph.input("saved")
    tokens = {}
    for owner, index, needs in arrivals:
        grad = graph.op(aten.relu.default, saved, name=f"g{owner}{index}")
        for bit in needs:
            grad = graph.op(aten.mul.Tensor, grad, given[bit], name=f"g{owner}{index}")
        token = graph.reduce(grad, anchors[owner], index)
        if owner in tokens:
            token = graph.op(aten.add.Tensor, tokens[owner], token)
        tokens[owner] = token
    forward = Sketch()
    forward.placeholder("run")
    groups = [group(i, "weight", "bias") for i in range(2)]
    backward = graph.done(saved, *(tokens.get(i) for i in range(2)))
    return program(*groups, forward=forward.done(), backward=backward)


def test_a_group_is_reduced_when_its_last_gradient_is_there():
    made = after(backward_of((1, 1, [0]), (0, 0, [0]), (1, 0, [0])), insert_reductions)
    assert_expected_inline(
        text(made.backward.graph),
        """\
g11 = relu(saved)
g11_1 = mul(g11, tangents_1)
g00 = relu(saved)
g00_1 = mul(g00, tangents_1)
group_layers_0 = run.open(a0)
reduce_layers_0 = group_layers_0.issue_reduce((g00_1), (0))
g10 = relu(saved)
g10_1 = mul(g10, tangents_1)
group_layers_1 = run.open(a1)
reduce_layers_1 = group_layers_1.issue_reduce((g10_1, g11_1), (0, 1))
reduced_layers_1 = reduce_layers_1.wait()
reduced_layers_0 = reduce_layers_0.wait()
return (saved, None, None)""",
    )


def test_one_tangent_needs_no_masks():
    made = after(backward_of((0, 0, [0]), (0, 1, [0])), insert_reductions)
    assert not issues(made)[0].kwargs


def test_masks_name_the_tangents_that_reach_a_gradient():
    arrivals = (1, 0, [1]), (1, 1, []), (0, 1, [0, 1]), (0, 0, [0])
    made = after(backward_of(*arrivals, tangents=2), insert_reductions)
    assert {str(node.args[0]): node.kwargs["tangents"] for node in issues(made)} == {
        "group_layers_0": (0b01, 0b11),
        "group_layers_1": (0b10, -1),  # a constant exists whatever is missing
    }


def with_layout(*layouts):
    """A joint graph with one gradient of group 0, parameter 0, per layout."""
    graph = Sketch()
    anchor, tangent = graph.anchor(0), graph.input("tangents_1")
    tokens = [
        graph.op(REDUCE_GRAD, graph.relus(tangent, 1), anchor, 0, layout) for layout in layouts
    ]
    token = tokens[0] if len(tokens) == 1 else graph.op(aten.add.Tensor, *tokens)
    return graph.done(token)


def test_layouts_of_gradients_reach_the_runtime():
    backward = with_run_input(with_layout(3))
    made = Program("g", (group(0),), 0, backward=backward)
    (issue,) = issues(insert_reductions(made))
    assert issue.kwargs == {"layouts": (3,)}


def test_gradients_of_several_layouts_are_not_summed():
    with pytest.raises(CaptureError, match=r"GS204.*layers.0.weight are DTensors of several"):
        sum_gradients(Program("g", (group(0),), 0, joint=with_layout(1, 2)))


def test_a_mesh_of_a_tangent_is_no_forward_output():
    class Fake:
        real_obj = "the mesh"

    graph = Sketch()
    x, tangent = graph.input("x"), graph.input("tangents_1")
    mesh = graph.placeholder("tangents_2")
    mesh.meta["val"] = Fake()
    made = Program("g", (), 2, joint=graph.done(graph.relus(x, 1), mesh, tangent))
    made = pin_meshes(made)
    _, pinned, gradient = output_node(made.joint.graph).args[0]
    assert (pinned.op, gradient) == ("get_attr", tangent)
    assert made.joint.mesh_of_tangents_2 == "the mesh"


def issues(made):
    return [node for node, _ in steps(made.backward.graph, StepKind.REDUCE_ISSUE)]


def test_nothing_is_reduced_without_backward():
    made = two_calls()
    before = texts(made)
    assert texts(insert_reductions(made)) == before
