"""Each pass on a small program: what holds before it, after it, and when it does nothing."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import META, Sketch, aten, group, layers, program, saving, text
from one_ahead import scheduled
from plans import plan
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.codegen.emit import with_run_input
from graphshard.compiler.planning import run_passes
from graphshard.errors import CaptureError, VerifyError
from graphshard.graph.marks import REDUCE_GRAD
from graphshard.graph.program import Program, output_node, step_of, steps
from graphshard.passes.apply_plan import apply_plan
from graphshard.passes.drop_duplicates import drop_duplicates
from graphshard.passes.fold_casts import fold_casts
from graphshard.passes.insert_gathers import insert_gathers
from graphshard.passes.insert_offloads import insert_offloads
from graphshard.passes.insert_reductions import insert_reductions
from graphshard.passes.insert_releases import insert_releases
from graphshard.passes.pin_meshes import pin_meshes
from graphshard.passes.sink_views import sink_views
from graphshard.passes.sum_gradients import sum_gradients
from graphshard.passes.tag_recompute import tag_recompute
from graphshard.schedule.plan import StepKind

HALF = torch.bfloat16


def run(made, *passes):
    """`made` after `passes`, each followed by the verifier."""
    return run_passes(made, passes)


def texts(made):
    return [text(module.graph) for module in made.graphs]


# -- drop_duplicates -----------------------------------------------------------------------


def two_calls():
    """Module 0 runs twice, module 1 once."""
    graph = Sketch()
    x, a0, a1 = graph.input("x"), graph.anchor(0), graph.anchor(1)
    y = graph.op(aten.mm.default, x, graph.unshard(a0))
    y = graph.op(aten.mm.default, y, graph.unshard(a1))
    y = graph.op(aten.mm.default, y, graph.unshard(a0))
    return program(group(0), group(1), forward=graph.done(y))


def test_calls_of_one_module_share_the_first_mark():
    made = run(two_calls(), drop_duplicates)
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
    assert texts(run(made, drop_duplicates)) == before


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
    made = run(joint_of_calls([0, 0, 0], summed=True), sum_gradients)
    assert_expected_inline(
        text(made.joint.graph),
        """\
add_tensor = add(g0, g1)
add_tensor_1 = add(add_tensor, g2)
token2 = reduce_grad(add_tensor_1, a0, 0)
return (token2)""",
    )


def test_tokens_of_other_parameters_stay_in_the_sum():
    made = run(joint_of_calls([0, 1, 0, 1], summed=True), sum_gradients)
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
    made = run(joint_of_calls([0, 1, 0], summed=False), sum_gradients)
    assert_expected_inline(
        text(made.joint.graph),
        """\
token1 = reduce_grad(g1, a1, 1)
add_tensor = add(g0, g2)
token2 = reduce_grad(add_tensor, a2, 0)
return (token2, token1, token2)""",
    )


def test_a_summed_gradient_has_the_value_of_its_addends():
    graph = run(joint_of_calls([0, 0], summed=True), sum_gradients).joint.graph
    total = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    assert total.meta["val"].shape == (4, 4)


def test_one_gradient_each_is_left_alone():
    made = joint_of_calls([0, 1], summed=True)
    before = texts(made)
    assert texts(run(made, sum_gradients)) == before


# -- fold_casts ----------------------------------------------------------------------------


def cast(graph, node, dtype=HALF):
    return graph.op(aten._to_copy.default, node, dtype=dtype)


def test_a_cast_of_every_use_moves_into_the_gather():
    graph = Sketch()
    x, anchor = cast(graph, graph.input("x")), graph.anchor(0)
    weight, bias = graph.unshard(anchor, 0), graph.unshard(anchor, 1, name="b")
    y = graph.op(aten.mm.default, x, cast(graph, weight))
    y = graph.op(aten.mm.default, y, cast(graph, weight))
    y = graph.op(aten.add.Tensor, y, bias)
    before = group(0, "weight", "bias")
    made = run(program(before, forward=graph.done(y)), fold_casts)
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
    made = run(made, fold_casts)
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
    made = run(program(joint=graph.done(graph.op(aten.t.default, y))), tag_recompute)
    assert recomputed(made) == ["w", "view", "_to_copy", "t"]
    assert weight.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_parameters_come_after_every_region_of_activation_checkpointing():
    """Or torch's partition would save them where a region reads what an earlier one made."""
    graph = Sketch()
    weight = graph.unshard(graph.anchor(0))
    weight.meta["ac_graph_id"] = 3
    run(program(joint=graph.done(graph.relus(weight, 1))), tag_recompute)
    assert weight.meta["ac_graph_id"] > 1_000_000


def test_the_parts_of_a_split_parameter_are_recomputed():
    graph = Sketch()
    made = program(joint=graph.done(split_in_two(graph, graph.unshard(graph.anchor(0)))))
    assert recomputed(run(made, tag_recompute)) == ["w", "split", "part", "part_1"]


def split_in_two(graph, weight):
    """`a * b` for `a, b = weight.split(2)`: one op that returns two views."""
    split = graph.op(aten.split.Tensor, weight, 2)
    first, second = (graph.op(operator.getitem, split, i, name="part") for i in range(2))
    return graph.op(aten.mul.Tensor, first, second)


def test_nothing_is_recomputed_without_backward():
    made = run(two_calls(), drop_duplicates, tag_recompute)
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
    run(made, sink_views)
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
    made = run(program(forward=graph.done(y)), sink_views)
    assert text(made.forward.graph) == "relu = relu(x)\nreturn (relu)"


def test_views_in_place_stay_in_place():
    made = run(layers(2), sink_views)
    before = texts(made)
    assert texts(run(made, sink_views)) == before


# -- insert_gathers ------------------------------------------------------------------------


def test_a_group_is_gathered_once_before_its_first_use():
    graph = Sketch()
    graph.placeholder("run")
    x, a0, a1 = graph.input("x"), graph.anchor(0), graph.anchor(1)
    y = graph.op(aten.mm.default, x, graph.unshard(a1, name="v"))
    weight, bias = graph.unshard(a0, 2), graph.unshard(a0, 0, name="b")
    y = graph.op(aten.mm.default, graph.op(aten.add.Tensor, y, bias), weight)
    groups = group(0, "bias", "unused", "weight"), group(1)
    made = run(program(*groups, forward=graph.done(y)), sink_views, insert_gathers)
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
    made = run(made, fold_casts, insert_gathers)
    issue, _ = next(steps(made.forward.graph, StepKind.GATHER_ISSUE))
    assert issue.args[1].args[2:] == (torch.float32, HALF)


def test_gathered_parameters_keep_the_value_and_get_the_name():
    made = run(layers(1), insert_gathers)
    item = next(n for n in made.forward.graph.nodes if n.name == "layers_0_weight")
    assert item.meta["val"].shape == (4, 4)


def test_no_mark_no_gather():
    graph = Sketch()
    graph.placeholder("run")
    made = program(forward=graph.done(graph.relus(graph.input("x"), 2)))
    before = texts(made)
    assert texts(run(made, sink_views, insert_gathers, insert_releases)) == before


# -- insert_releases -----------------------------------------------------------------------


def test_groups_are_released_after_the_last_reader_of_a_view():
    made = run(layers(2), sink_views, insert_gathers, insert_releases)
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
    made = run(made, sink_views, insert_gathers, insert_releases)
    assert methods(made.forward.graph) == {0: "release", 1: "release_for_backward"}
    assert methods(made.backward.graph) == {1: "release"}


def test_without_backward_every_release_is_for_good():
    made = run(two_calls(), drop_duplicates, insert_gathers, insert_releases)
    assert methods(made.forward.graph) == {0: "release", 1: "release"}


def test_a_split_parameter_is_released_after_the_last_reader_of_a_part():
    graph = Sketch()
    graph.placeholder("run")
    made = program(forward=graph.done(split_in_two(graph, graph.unshard(graph.anchor(0)))))
    run(made, sink_views, insert_gathers, insert_releases)
    names = [n.name for n in graph.nodes]
    assert names.index("mul") < names.index("release_layers_0")


@pytest.mark.parametrize("name", ["w0", "t"])
def test_what_an_output_aliases_is_not_released(name):
    made = layers(2)
    out = output_node(made.forward.graph)
    escaping = next(n for n in made.forward.graph.nodes if n.name == name)
    out.args = ((escaping, *out.args[0][1:]),)
    made = run(made, sink_views, insert_gathers, insert_releases)
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
    made = run(backward_of((1, 1, [0]), (0, 0, [0]), (1, 0, [0])), insert_reductions)
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
    made = run(backward_of((0, 0, [0]), (0, 1, [0])), insert_reductions)
    assert not issues(made)[0].kwargs


def test_masks_name_the_tangents_that_reach_a_gradient():
    arrivals = (1, 0, [1]), (1, 1, []), (0, 1, [0, 1]), (0, 0, [0])
    made = run(backward_of(*arrivals, tangents=2), insert_reductions)
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


# -- apply_plan ----------------------------------------------------------------------------

PLACED = (sink_views, insert_gathers, insert_releases, insert_reductions)
FORWARD = "issue 0, issue 1, wait 0, compute 2, wait 1, compute 4, release 0, release 1"
BACKWARD = (
    "issue 1, wait 1, compute 3, reduce 1, reduced 1, issue 0, wait 0, compute 3, release 1,"
    "release 0, reduce 0, reduced 0"
)


def placed():
    return run(layers(2), *PLACED)


def plan_of(forward=FORWARD, backward=BACKWARD):
    return plan([group(0), group(1)], forward, backward)


def comm(graph):
    """The communication steps in graph order, each named once."""
    found = [step for n in graph.nodes if (step := step_of(n)) and step.part == "head"]
    return [(step.kind, step.group) for step in found]


def planned_comm(planned):
    return [(s.kind, s.group) for s in planned.steps if s.group is not None]


def compute(graph):
    plain = [n for n in graph.nodes if step_of(n) is None]
    return [n.name for n in plain if n.op == "call_function"]


def test_graph_order_becomes_schedule_order():
    made = placed()
    orders = [compute(module.graph) for module in made.directions]
    made = run(made, with_plan(plan_of()))
    assert_expected_inline(
        text(made.forward.graph),
        """\
group_layers_0 = run.open(a0, float32)
gather_layers_0 = run.issue_gather(group_layers_0)
group_layers_1 = run.open(a1, float32)
gather_layers_1 = run.issue_gather(group_layers_1)
params_layers_0 = gather_layers_0.wait(group_layers_0)
layers_0_weight = params_layers_0[0]
t = t(layers_0_weight)
mm = mm(x, t)
params_layers_1 = gather_layers_1.wait(group_layers_1)
layers_1_weight = params_layers_1[0]
relu = relu(mm)
t_1 = t(layers_1_weight)
mm_1 = mm(relu, t_1)
relu_1 = relu(mm_1)
release_layers_0 = group_layers_0.release_for_backward()
release_layers_1 = group_layers_1.release_for_backward()
return (relu_1, x, relu, a0, a1)""",
    )
    assert [compute(module.graph) for module in made.directions] == orders
    for module, planned in zip(made.directions, plan_of().schedules, strict=True):
        assert comm(module.graph) == planned_comm(planned)


def with_plan(wanted):
    def apply(program):
        return apply_plan(program, wanted)

    return apply


def test_the_planners_schedule_is_applied():
    made, planned = scheduled(layers(3))
    for module, wanted in zip(made.directions, planned.schedules, strict=True):
        assert comm(module.graph) == planned_comm(wanted)
    assert comm(made.forward.graph)[:3] == [
        (StepKind.GATHER_ISSUE, 0),
        (StepKind.GATHER_WAIT, 0),
        (StepKind.GATHER_ISSUE, 1),
    ]
    assert planned.summary().collectives == 9


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (", release 1", "release of group 1"),
        ("issue 1, ", "gather_issue of group 1"),
        (", compute 4", "compute ops"),
    ],
)
def test_a_schedule_that_leaves_something_out_is_refused(left_out, message):
    assert left_out in FORWARD
    with pytest.raises(VerifyError, match=f"GS310: the schedule leaves out {message}$") as caught:
        apply_plan(placed(), plan_of(forward=FORWARD.replace(left_out, "")))
    assert caught.value.code == "GS310"


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (f"{FORWARD}, reduce 0", BACKWARD),
        (f"{FORWARD}, release 1", BACKWARD),
        (f"{FORWARD}, compute 1", BACKWARD),
        (FORWARD, None),
    ],
    ids=["step that the graph lacks", "step twice", "too many ops", "direction left out"],
)
def test_a_schedule_that_says_too_much_or_too_little_is_refused(forward, backward):
    with pytest.raises(VerifyError):
        apply_plan(placed(), plan_of(forward, backward))


# -- insert_offloads -----------------------------------------------------------------------


def offloading(made):
    def insert(made):
        return insert_offloads(made, {"h": 0, "whole": 0})

    return run(made, insert)


def test_the_host_holds_an_activation_between_its_last_reader_and_its_first():
    forward, backward = texts(offloading(saving()))
    assert_expected_inline(
        forward,
        """\
h = relu(x)
t = t(h)
y = mm(t, x)
offload_layers_0 = run.issue_offload(None, (h))
wait = offload_layers_0.wait()
h_held = wait[0]
return (y, h_held)""",
    )
    assert_expected_inline(
        backward,
        """\
first = relu(tangents_1)
reload_layers_0 = run.issue_reload(None, (h))
wait = reload_layers_0.wait()
h_back = wait[0]
dh = add(h_back, 1)
return (first, dh)""",
    )


def test_views_read_nothing_and_move_to_the_copies():
    """The one that is saved would hold the copy up until forward ends, the other until backward
    begins."""
    made = saving(views=True)
    assert texts(made)[0].endswith("back = t(h)\nshown = t(back)\nreturn (last, shown)")
    assert texts(made)[1].startswith("early = t(shown)")
    forward, backward = texts(offloading(made))
    assert_expected_inline(
        forward,
        """\
h = relu(x)
t = t(h)
y = mm(t, x)
back = t(h)
shown = t(back)
offload_layers_0 = run.issue_offload(None, (shown))
wait = offload_layers_0.wait()
shown_held = wait[0]
last = relu(y)
return (last, shown_held)""",
    )
    assert_expected_inline(
        backward,
        """\
first = relu(tangents_1)
reload_layers_0 = run.issue_reload(None, (shown))
wait = reload_layers_0.wait()
shown_back = wait[0]
early = t(shown_back)
dearly = add(early, 1)
return (first, dearly)""",
    )


@pytest.mark.parametrize("how", ["shared", "gaps"])
def test_what_shares_its_memory_or_has_gaps_stays(how):
    made = saving(**{how: True})
    before = texts(made)
    assert texts(offloading(made)) == before
