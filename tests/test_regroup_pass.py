"""Merged and split all-gathers in the graph: plans made by hand, and what the verifier refuses."""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from graphs import Sketch, aten, group, layers, program, text
from plans import plan

from graphshard.compiler.planning import run_passes
from graphshard.errors import VerifyError
from graphshard.graph.program import step_of, steps
from graphshard.graph.verify import verify
from graphshard.passes import PLACEMENT
from graphshard.passes.apply_plan import apply_plan
from graphshard.passes.regroup import regroup
from graphshard.schedule.plan import StepKind

BACKWARD = (
    "issue 1, wait 1, issue 0, compute 3, reduce 1, wait 0, compute 3, release 1,"
    "release 0, reduce 0, reduced 1, reduced 0"
)


def placed(made=None):
    return run_passes(made or layers(2), PLACEMENT)


def planned(made, forward, backward=BACKWARD):
    """`made` after the plan, each pass followed by the verifier."""
    wanted = plan(made.groups, forward, backward)
    for follow in (regroup, apply_plan):
        made = follow(made, wanted)
        verify(made, after=follow.__name__)
    return made


def test_two_groups_travel_in_one_all_gather():
    made = planned(
        placed(), "issue 0+1, wait 0+1, compute 3, release 0, compute 2, release 1, compute 1"
    )
    assert_expected_inline(
        text(made.forward.graph),
        """\
group_layers_0 = run.open(a0, float32)
group_layers_1 = run.open(a1, float32)
gather_layers_0 = run.issue_gather(group_layers_0, group_layers_1)
params_layers_0 = gather_layers_0.wait(group_layers_0)
layers_0_weight = params_layers_0[0]
params_layers_1 = gather_layers_0.wait(group_layers_1)
layers_1_weight = params_layers_1[0]
t = t(layers_0_weight)
mm = mm(x, t)
relu = relu(mm)
release_layers_0 = group_layers_0.release_for_backward()
t_1 = t(layers_1_weight)
mm_1 = mm(relu, t_1)
release_layers_1 = group_layers_1.release_for_backward()
relu_1 = relu(mm_1)
return (relu_1, x, relu, a0, a1)""",
    )


def three_parameters():
    """Parameters 0 and 2 are used far apart, parameter 1 not at all."""
    graph = Sketch()
    graph.placeholder("run")
    x, anchor = graph.input("x"), graph.anchor(0)
    first, second = (graph.unshard(anchor, index, f"w{index}") for index in (0, 2))
    y = graph.op(aten.mm.default, graph.op(aten.mm.default, x, first), second)
    return program(group(0, "q", "bias", "k"), forward=graph.done(y))


def test_a_group_travels_in_several_all_gathers_and_is_released_once():
    made = planned(
        placed(three_parameters()),
        "issue 0:0/1, wait 0:0/1, issue 0:2, compute 1, wait 0:2, compute 1, release 0",
        None,
    )
    assert_expected_inline(
        text(made.forward.graph),
        """\
group_layers_0 = run.open(a0, float32)
gather_layers_0_q = run.issue_gather(group_layers_0, params=(0, 1))
params_layers_0_q = gather_layers_0_q.wait(group_layers_0)
layers_0_q = params_layers_0_q[0]
gather_layers_0_k = run.issue_gather(group_layers_0, params=(2))
mm = mm(x, layers_0_q)
params_layers_0_k = gather_layers_0_k.wait(group_layers_0)
layers_0_k = params_layers_0_k[2]
mm_1 = mm(mm, layers_0_k)
release_layers_0 = group_layers_0.release()
return (mm_1)""",
    )


SPLIT = "issue 0:0/1, issue 0:2, wait 0:0/1, wait 0:2, compute 2, release 0"


def broken_by(forward, made=None, backward=BACKWARD):
    made = made or placed()
    with pytest.raises(VerifyError) as caught:
        planned(made, forward, backward)
    return caught.value


def refused(made):
    with pytest.raises(VerifyError) as caught:
        verify(made, after="some_pass")
    return caught.value


def test_a_parameter_that_the_plan_forgets():
    made = placed(three_parameters())
    forward = "issue 0:0, issue 0:2, wait 0:0, wait 0:2, compute 2, release 0"
    error = broken_by(forward, made, None)
    assert error.code == "GS305"
    assert "it never travels" in error.message
    assert "parameter: layers.0.bias" in error.message


def test_a_used_parameter_that_the_plan_forgets():
    forward = "issue 0:0, issue 0:1, wait 0:0, wait 0:1, compute 2, release 0"
    error = broken_by(forward, placed(three_parameters()), None)
    assert (error.code, error.message) == ("GS310", "the plan leaves out parameters of layers.0")


def test_a_parameter_that_travels_twice():
    forward = "issue 0:0/1, issue 0:1/2, wait 0:0/1, wait 0:1/2, compute 2, release 0"
    error = broken_by(forward, placed(three_parameters()), None)
    assert error.code == "GS305"
    assert "second gather_issue" in error.message


@pytest.mark.parametrize(
    "forward",
    [
        "issue 0+2, wait 0+2, compute 3, release 0, compute 2, release 1, compute 1",
        "issue 0+1, issue 1, wait 0+1, compute 3, release 0, compute 2, release 1, compute 1",
        "issue 0+1, wait 0, compute 3, release 0, compute 2, release 1, compute 1",
    ],
)
def test_a_plan_that_does_not_fit(forward):
    assert broken_by(forward).code == "GS310"


def test_waits_of_a_merged_gather_stand_together():
    forward = "issue 0+1, wait 0, compute 3, wait 1, release 0, compute 2, release 1, compute 1"
    error = broken_by(forward)
    assert error.code == "GS311"
    assert "t stands between them" in error.message


def test_gs306_a_part_is_read_after_the_release():
    made = planned(placed(three_parameters()), SPLIT, None)
    (release,) = (n for n, _ in steps(made.forward.graph, StepKind.RELEASE))
    next(n for n in made.forward.graph.nodes if n.name == "mm").append(release)
    error = refused(made)
    assert (error.code, "parameter: layers.0.k" in error.message) == ("GS306", True)


def test_gs305_wait_for_a_group_that_does_not_travel_in_it():
    made = planned(
        placed(), "issue 0+1, wait 0+1, compute 3, release 0, compute 2, release 1, compute 1"
    )
    (issue,) = (n for n, _ in steps(made.forward.graph, StepKind.GATHER_ISSUE))
    issue.args = issue.args[:2]
    error = refused(made)
    assert (error.code, "0 waits" in error.message) == ("GS305", True)
    assert step_of(issue).group == 0


def replicated():
    made = layers(2)
    groups = (replace(made.groups[0], replicated=True, replicas=2), made.groups[1])
    return placed(made.with_groups(groups))


def test_replicas_add_up_what_was_reduced():
    made = replicated()
    forward = "issue 0, wait 0, compute 3, release 0, issue 1, wait 1, compute 3, release 1"
    wanted = BACKWARD.replace("reduced 1, reduced 0", "reduced 0, add 0, reduced 1, added 0")
    backward = text(planned(made, forward, wanted).backward.graph)
    assert backward.splitlines()[-5:-1] == [
        "reduced_layers_0 = reduce_layers_0.wait()",
        "all_reduce_layers_0 = run.issue_all_reduce(reduced_layers_0)",
        "reduced_layers_1 = reduce_layers_1.wait()",
        "all_reduced_layers_0 = all_reduce_layers_0.wait()",
    ]


def test_an_all_reduce_follows_its_reduction():
    wanted = BACKWARD.replace("reduced 1, reduced 0", "add 0, reduced 0, reduced 1, added 0")
    forward = "issue 0, wait 0, compute 3, release 0, issue 1, wait 1, compute 3, release 1"
    with pytest.raises(VerifyError, match="GS309"):
        planned(replicated(), forward, wanted)
    with pytest.raises(VerifyError, match=r"GS310.*leaves out all_reduce"):
        planned(replicated(), forward)


def test_what_replicas_add_up_is_not_split():
    made = replicated()
    wanted = plan(made.groups, "compute 0", BACKWARD.replace("reduce 0", "reduce 0:0"))
    with pytest.raises(VerifyError, match=r"GS310: replicas add up gradients of layers\.0"):
        regroup(made, wanted)
