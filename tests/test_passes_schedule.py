"""Passes that give collectives and copies their places, on small programs.

What holds before each, after it, and when it does nothing.
"""

import pytest
from expecttest import assert_expected_inline
from graphs import after, group, layers, saving, text, texts
from one_ahead import scheduled
from plans import plan

from graphshard.errors import VerifyError
from graphshard.graph.program import step_of
from graphshard.passes.apply_plan import apply_plan
from graphshard.passes.insert_gathers import insert_gathers
from graphshard.passes.insert_offloads import insert_offloads
from graphshard.passes.insert_reductions import insert_reductions
from graphshard.passes.insert_releases import insert_releases
from graphshard.passes.sink_views import sink_views
from graphshard.schedule.plan import StepKind

# -- apply_plan ----------------------------------------------------------------------------

PLACED = (sink_views, insert_gathers, insert_releases, insert_reductions)
FORWARD = "issue 0, issue 1, wait 0, compute 2, wait 1, compute 4, release 0, release 1"
BACKWARD = (
    "issue 1, wait 1, compute 3, reduce 1, reduced 1, issue 0, wait 0, compute 3, release 1,"
    "release 0, reduce 0, reduced 0"
)


def placed():
    return after(layers(2), *PLACED)


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
    made = after(made, with_plan(plan_of()))
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

    return after(made, insert)


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
