"""The verifier: each rule, broken alone, names itself, the group, the parameter and the place."""

import operator

import pytest
import torch
from graphs import Sketch, aten, group, layers, program, saving
from one_ahead import scheduled
from plans import plan

from graphshard.compiler import planning
from graphshard.compiler.planning import run_passes
from graphshard.errors import VerifyError
from graphshard.graph.program import adopt, note_attributes, output_node, reduce_marks, steps
from graphshard.graph.verify import RULES, verify
from graphshard.passes import CAPTURED, PLACEMENT
from graphshard.passes.insert_offloads import insert_offloads
from graphshard.passes.regroup import regroup
from graphshard.schedule.plan import StepKind


def error_of(broken):
    with pytest.raises(VerifyError) as caught:
        verify(broken, after="some_pass")
    return caught.value


def check(broken, code, culprit, fqn="layers.0", param=None):
    """`code` alone is broken, and its message says where."""
    assert [rule.code for rule in RULES if any(rule.check(broken))] == [code]
    error = error_of(broken)
    assert error.code == code
    first, *rest = error.message.split("\n")
    sentence = next(rule.sentence for rule in RULES if rule.code == code)
    assert first.startswith(f"after pass 'some_pass': {sentence}; ")
    named = [line for line in rest if line.startswith(("group ", "parameter: "))]
    expected = [] if fqn is None else [f"group {fqn[-1]}: {fqn}"]
    assert named == expected + ([] if param is None else [f"parameter: {param}"])
    nodes = rest[len(named) :]
    assert 1 < len(nodes) <= 10
    marked = [line for line in nodes if line.startswith(">")]
    assert len(marked) == 1
    assert marked[0].startswith(f"> %{culprit} :")


def placed():
    """Two layers with all communication in place, far enough from the ends of the graphs."""
    made = run_passes(layers(2), PLACEMENT)
    for module in made.directions:
        out = output_node(module.graph)
        with module.graph.inserting_before(out):
            for _ in range(12):
                module.graph.call_function(aten.relu.default, (out.args[0][0],))
    return made


def head(module, kind, group=0):
    return next(node for node, step in steps(module.graph, kind) if step.group == group)


def joint_with(anchor_group=0, index=0, output="token"):
    """A joint graph of one mark each; `output` is what becomes the anchor's gradient."""
    graph = Sketch()
    x, anchor = graph.relus(graph.input("x"), 12), graph.anchor(anchor_group, "a0")
    y = graph.op(aten.mm.default, x, graph.unshard(anchor, index))
    token = graph.reduce(y, anchor, index)
    tail = graph.relus(y, 12)
    return program(joint=graph.done(tail, token if output == "token" else None))


def test_healthy_programs_pass():
    verify(joint_with(), after="capture")
    verify(layers(3), after="the partition")
    verify(placed(), after="placement")
    verify(scheduled(layers(3))[0], after="apply_plan")


def test_every_rule_has_a_test():
    tested = {name[5:10].upper() for name in globals() if name.startswith("test_gs")}
    assert {rule.code for rule in RULES} <= tested


def test_gs301_index_of_no_parameter():
    check(joint_with(index=1), "GS301", culprit="w")


@pytest.mark.parametrize("unknown", [-1, 1])
def test_gs301_group_that_the_program_lacks(unknown):
    check(joint_with(anchor_group=unknown), "GS301", culprit="w", fqn=None)


def test_gs302_gradient_whose_token_is_unused():
    broken = joint_with(output="nothing")
    check(broken, "GS302", culprit="token", param="layers.0.weight")


def test_gs303_mark_is_saved_for_backward():
    broken = layers(2)
    save_more(broken.forward.graph, "w1")
    check(broken, "GS303", culprit="w1", fqn="layers.1", param="layers.1.weight")


def test_gs303_view_of_a_gathered_parameter_is_saved_for_backward():
    # Without releases: with them, the output reads the view too late as well.
    broken = run_passes(layers(2), PLACEMENT[:2])
    save_more(broken.forward.graph, "t_1")
    check(broken, "GS303", culprit="t_1", fqn="layers.1", param="layers.1.weight")


def test_gs303_part_of_a_split_parameter_is_saved_for_backward():
    graph, nothing = Sketch(), Sketch()
    split = graph.op(aten.split.Tensor, graph.unshard(graph.anchor(0)), 2)
    part = graph.op(operator.getitem, split, 0, name="part")
    forward = graph.done(graph.relus(part, 12), part)
    broken = program(forward=forward, backward=nothing.done())
    check(broken, "GS303", culprit="part", param="layers.0.weight")


def test_gs303_is_about_saved_values_not_about_outputs():
    made = layers(1)
    out = output_node(made.forward.graph)
    weight = next(n for n in made.forward.graph.nodes if n.name == "w0")
    out.args = ((weight, *out.args[0][1:]),)
    verify(made, after="some_pass")


def save_more(graph, name):
    out = output_node(graph)
    out.args = ((*out.args[0], next(n for n in graph.nodes if n.name == name)),)


def test_gs304_two_marks_of_one_parameter():
    broken = layers(2)
    graph = broken.forward.graph
    first = next(n for n in graph.nodes if n.name == "w0")
    with graph.inserting_after(first):
        graph.node_copy(first).name = "again"
    check(broken, "GS304", culprit="again", param="layers.0.weight")


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [(StepKind.GATHER_WAIT, "gather_layers_0"), (StepKind.RELEASE, "second_release")],
)
def test_gs305_second_wait_or_release(kind, culprit):
    broken = placed()
    repeat(head(broken.backward, kind))
    check(broken, "GS305", culprit)


def test_gs305_second_gather():
    broken = placed()
    issue = repeat(head(broken.forward, StepKind.GATHER_ISSUE, 1))
    wait = repeat(head(broken.forward, StepKind.GATHER_WAIT, 1))
    wait.args = (issue, wait.args[1])
    check(broken, "GS305", culprit="second_issue_gather", fqn="layers.1")


def repeat(node):
    """`node` once more, right behind itself."""
    with node.graph.inserting_after(node):
        copy = node.graph.node_copy(node)
    copy.name = f"second_{node.target}"
    return copy


def test_gs305_reduction_that_nothing_waits_for():
    broken = placed()
    wait = head(broken.backward, StepKind.REDUCE_WAIT, 1)
    broken.backward.graph.erase_node(wait)
    check(broken, "GS305", culprit="reduce_layers_1", fqn="layers.1")


def test_gs306_view_is_read_after_the_release():
    broken = placed()
    graph = broken.forward.graph
    release = head(broken.forward, StepKind.RELEASE)
    view = next(n for n in graph.nodes if n.name == "t")
    view.append(release)
    check(broken, "GS306", culprit="mm", param="layers.0.weight")


def test_gs306_release_before_the_wait():
    broken = placed()
    release = head(broken.backward, StepKind.RELEASE, 1)
    head(broken.backward, StepKind.GATHER_ISSUE, 1).append(release)
    check(broken, "GS306", culprit=release.name, fqn="layers.1")


def test_gs307_gather_without_release():
    broken = placed()
    broken.forward.graph.erase_node(head(broken.forward, StepKind.RELEASE, 1))
    check(broken, "GS307", culprit="params_layers_1", fqn="layers.1")


def test_gs307_allows_what_the_graph_hands_out():
    made = layers(2)
    graph = made.forward.graph
    out = output_node(graph)
    out.args = ((next(n for n in graph.nodes if n.name == "w1"), *out.args[0][1:]),)
    verify(run_passes(made, PLACEMENT), after="some_pass")
    assert [step.group for _, step in steps(graph, StepKind.RELEASE)] == [0]


def test_gs308_gradients_out_of_registration_order():
    graph = Sketch()
    graph.placeholder("run")
    x, anchor = graph.relus(graph.input("tangents_1"), 12), graph.anchor(0)
    grads = [graph.relus(x, 1) for _ in range(2)]
    tokens = [graph.reduce(grad, anchor, index) for index, grad in enumerate(grads)]
    backward = graph.done(graph.relus(x, 12), *tokens)
    empty = Sketch()
    empty.placeholder("run")
    made = program(group(0, "weight", "bias"), forward=empty.done(), backward=backward)
    broken = run_passes(made, PLACEMENT)
    issue = head(broken.backward, StepKind.REDUCE_ISSUE)
    issue.args = (issue.args[0], issue.args[1], (1, 0))
    check(broken, "GS308", culprit="reduce_layers_0")


def test_a_pass_that_breaks_a_rule_is_named_and_is_the_last_to_run():
    ran = []

    def harmless(program):
        ran.append("harmless")
        return program

    def lose_a_token(program):
        graph = program.joint.graph
        reduce_marks(graph)[0].node.replace_all_uses_with(next(iter(graph.nodes)))
        return program

    with pytest.raises(VerifyError, match="GS302: after pass 'lose_a_token'"):
        run_passes(joint_with(), (harmless, lose_a_token, harmless))
    assert ran == ["harmless"]


def test_every_pass_is_followed_by_the_verifier(monkeypatch):
    checked = []
    monkeypatch.setattr(planning, "verify", lambda program, after: checked.append(after))
    planning.run_captured(joint_with())
    scheduled(layers(1))
    assert checked == [p.__name__ for p in (*CAPTURED, *PLACEMENT)] + ["regroup", "apply_plan"]


def test_gs311_waits_of_one_gather_stand_together():
    broken = regroup(placed(), plan([group(0), group(1)], "issue 0+1", "issue 0, issue 1"))
    wait = head(broken.forward, StepKind.GATHER_WAIT, 1)
    mm = next(n for n in broken.forward.graph.nodes if n.name == "mm")
    for node in (*wait.users, wait):
        mm.append(node)
    check(broken, "GS311", culprit="gather_layers_0")


def test_gs312_a_constant_is_overwritten():
    made = layers(2)
    forward = made.forward
    forward.register_buffer("scale", torch.tensor(2.0))
    with forward.graph.inserting_before(output_node(forward.graph)):
        forward.graph.get_attr("scale")
    note_attributes(forward.graph)
    verify(made, after="some_pass")
    assert adopt(forward, torch.tensor(3.0), "scale") == "scale_1"
    verify(made, after="some_pass")
    forward.scale = torch.tensor(3.0)
    check(made, "GS312", culprit="scale", fqn=None)


def test_gs313_what_is_offloaded_is_read_again():
    made = insert_offloads(saving(), {"h": 0})
    verify(made, after="some_pass")
    graph = made.forward.graph
    with graph.inserting_before(output_node(graph)):
        graph.call_function(aten.relu.default, (next(n for n in graph.nodes if n.name == "h"),))
    check(made, "GS313", culprit="offload_layers_0")


def test_gs313_what_the_host_holds_is_read():
    made = insert_offloads(saving(), {"h": 0})
    graph = made.backward.graph
    with graph.inserting_before(output_node(graph)):
        graph.call_function(aten.relu.default, (next(n for n in graph.nodes if n.name == "h"),))
    check(made, "GS313", culprit="reload_layers_0")
