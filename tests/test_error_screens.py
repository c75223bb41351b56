"""Errors that no other test produces, each with its code; and that every code is in some test."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import Sketch, group, program
from planning import layers
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput
from torch.distributed.fsdp import fully_shard

from graphshard.capture.root_state import root_states_under
from graphshard.cli import main
from graphshard.codegen.emit import check_inputs
from graphshard.compiler import graph_compiler
from graphshard.errors import (
    CaptureError,
    PlanError,
    RuntimeStateError,
    UnsupportedModel,
    VerifyError,
)
from graphshard.graph.marks import REDUCE_GRAD, UNSHARD
from graphshard.graph.verify import verify
from graphshard.offline.world import pretended
from graphshard.planner.plan_step import plan_step
from graphshard.planner.simulate import simulate
from graphshard.runtime.gather import Gather
from graphshard.runtime.live import lookup

ROOT = Path(__file__).parents[1]
STRICT = {"fallback": "error", "verify": "off"}


def test_every_code_is_produced_by_a_test():
    codes = re.findall(r"^### (GS\d+)", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    said = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [code for code in codes if code not in said] == []


@pytest.fixture
def model():
    """Two sharded layers on one rank, which have run once."""
    with pretended(1):
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in made:
            fully_shard(layer)
        fully_shard(made).compile(backend="graphshard", options=STRICT)
        made(torch.ones(2, 4)).sum().backward()
        yield made
        torch._dynamo.reset()


def live_of(model):
    return root_states_under(model)[0].groups[0]


@pytest.mark.parametrize("mark", [UNSHARD, REDUCE_GRAD])
def test_a_mark_is_never_run(mark):
    one = torch.ones(())
    args = (one, [2], torch.float32, one.device, 0) if mark is UNSHARD else (one, one, 0)
    with pytest.raises(CaptureError, match=r"GS201: a graphshard::\w+ mark was executed"):
        mark(*args)


def test_inputs_that_autograd_changed():
    def graph(*names):
        made = fx.Graph()
        made.output(tuple(made.placeholder(name) for name in names))
        return fx.GraphModule(nn.Module(), made)

    with pytest.raises(CaptureError, match="GS202: AOTAutograd changed the inputs"):
        check_inputs(graph("run", "a", "b"), graph("a", "c"))


def test_a_tangent_of_no_output():
    made = fx.Graph()
    tangent = made.placeholder("tangents_1")
    tangent.meta["desc"] = TangentAOTInput(PlainAOTOutput(1))
    made.output((tangent,)).meta["desc"] = (PlainAOTOutput(0),)
    with pytest.raises(CaptureError, match="GS203: no output belongs to tangents_1"):
        graph_compiler._tangent_positions(fx.GraphModule(nn.Module(), made), 1)


class Own(nn.Linear):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


def test_a_group_that_stays_eager():
    with pretended(2):
        made = fully_shard(nn.Sequential(fully_shard(Own(4, 4))))
        made.compile(backend="graphshard", options=STRICT)
        with pytest.raises(UnsupportedModel, match="GS210: group 0 runs through eager FSDP2"):
            made(torch.ones(2, 4))


class Breaks(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_group_outside_of_the_graph():
    with pretended(1):
        made = fully_shard(nn.Sequential(fully_shard(Breaks(4, 4)), nn.Linear(4, 4)))
        made.compile(backend="graphshard", options=STRICT)
        with pytest.raises(CaptureError, match=r"GS211: .* did not run inside a graph because"):
            made(torch.ones(2, 4))
        torch._dynamo.reset()


def test_a_graph_that_is_not_well_formed():
    graph = Sketch()
    x = graph.input("x")
    first = graph.op(torch.ops.aten.relu.default, x)
    second = graph.op(torch.ops.aten.neg.default, first)
    module = graph.done(second)
    first.prepend(second)
    with pytest.raises(
        VerifyError, match="GS309: after pass 'some_pass': the graph is well formed"
    ):
        verify(program(group(0), forward=module), after="some_pass")


def test_a_parameter_that_changed_its_dtype(model):
    live = live_of(model)
    live.orig_dtypes = (torch.float64,) * len(live.orig_dtypes)
    with pytest.raises(RuntimeStateError, match=r"GS401: 0\.weight was torch\.float64"):
        live.shards()


def test_a_group_that_is_gone():
    with pytest.raises(RuntimeStateError, match="GS402: no group has number"):
        lookup(torch.tensor(-7.0))


def test_a_gather_used_after_its_release(model):
    live = live_of(model)
    gather = Gather(live, live.dtypes)
    gather._gathered = None
    with pytest.raises(RuntimeStateError, match="GS403: 0 was used after its release"):
        gather._buffers_here()


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="2.15 reduces gradients of several dtypes")
def test_gradients_of_several_dtypes(model):
    group = live_of(model).fsdp
    grads = [torch.ones(4, 4), torch.ones(4, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeStateError, match="GS404: gradients of 0 have dtypes"):
        group.reduce_dtype(group.params, grads)


def test_a_problem_that_contradicts_itself():
    with pytest.raises(PlanError, match="GS602: micro_steps is 0"):
        plan_step(layers(2, micro_steps=0))


def test_a_wait_before_its_issue():
    problem = layers(2)
    forward, backward = plan_step(problem).schedules
    swapped = replace(forward, steps=(forward.steps[1], forward.steps[0], *forward.steps[2:]))
    with pytest.raises(PlanError, match=r"GS603: .* comes before its issue"):
        simulate(problem, (swapped, backward))


def test_a_function_that_fails_says_where(tmp_path, capsys):
    file = tmp_path / "bad.py"
    file.write_text("def build():\n    raise RuntimeError('CUDA is not there')\n")
    assert main(["plan", f"{file}:build", "--world", "2", "--hw", "h100"]) == 4
    said = capsys.readouterr().err
    assert f"GS911: build fails at {file}:2: RuntimeError: CUDA is not there; there is no" in said
