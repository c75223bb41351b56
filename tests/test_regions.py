"""Regions: found between communication, told apart by what they do, called in place of ops."""

import operator

import graphs
import torch
from torch import fx

from graphshard.codegen.regions import Artifacts, compile_missing, linked, sliced
from graphshard.graph.program import CommStep, set_step
from graphshard.schedule.plan import StepKind

aten = torch.ops.aten


def interpreted(bodies):
    """What runs a region op by op; the list is emptied, as compiled code does it."""

    def one(body):
        def call(args):
            given = list(args)
            args.clear()
            return fx.GraphModule(body, body.graph).forward(*given)

        return call

    return [one(body) for body in bodies]


def chain(*parts):
    """Groups of ops with a communication step between them; each part is a list of functions."""
    op_costs = graphs.Sketch()
    run = op_costs.input("run")
    x = op_costs.input("x", 4, 4)
    for number, part in enumerate(parts):
        if number:
            step = op_costs.call_method("release", (run,))
            set_step(step, CommStep(StepKind.RELEASE, 0))
        for target in part:
            x = op_costs.op(target, x)
    return op_costs.done(x)


class Releases:
    def __init__(self):
        self.count = 0

    def release(self):
        self.count += 1


def linked_module(module, starts=()):
    artifacts = Artifacts(interpreted)
    part = sliced(module, starts)
    compile_missing([part], artifacts)
    return linked(part, artifacts), artifacts


def test_alike_regions_share_one_function_and_results_stay():
    block = [aten.relu.default, aten.neg.default, aten.exp.default]
    module = chain(block, block, [aten.sin.default], block)
    made, artifacts = linked_module(module)
    assert artifacts.num_regions == 4
    assert len(artifacts.by_key) == 2
    releases, x = Releases(), torch.randn(4, 4)
    assert torch.equal(made(releases, x)[0], module(Releases(), x)[0])
    assert releases.count == 3


def test_starts_cut_what_nothing_interrupts():
    module = chain([aten.relu.default] * 6)
    _, artifacts = linked_module(module, starts={2, 4})
    assert artifacts.num_regions == 3
    assert len(artifacts.by_key) == 1


def test_constants_and_layouts_tell_regions_apart():
    op_costs = graphs.Sketch()
    run, x = op_costs.input("run"), op_costs.input("x", 4, 4)
    y = op_costs.op(aten.add.Scalar, x, 1)
    set_step(op_costs.call_method("release", (run,)), CommStep(StepKind.RELEASE, 0))
    z = op_costs.op(aten.add.Scalar, y, 2)
    set_step(op_costs.call_method("release", (run,)), CommStep(StepKind.RELEASE, 0))
    w = op_costs.op(aten.add.Scalar, op_costs.op(aten.t.default, z), 2)
    _, artifacts = linked_module(op_costs.done(w))
    assert len(artifacts.by_key) == 3


def test_a_view_of_another_region_is_made_again():
    op_costs = graphs.Sketch()
    run, x = op_costs.input("run"), op_costs.input("x", 4, 4)
    y = op_costs.op(aten.relu.default, x)
    view = op_costs.op(aten.t.default, y)
    first = op_costs.op(aten.mm.default, y, view)
    set_step(op_costs.call_method("release", (run,)), CommStep(StepKind.RELEASE, 0))
    second = op_costs.op(aten.mm.default, first, view)
    module = op_costs.done(second)
    part = sliced(module, ())
    before, after = part.regions.values()
    assert view not in before.outputs
    assert view in after.nodes
    assert y in after.inputs
    made, _ = linked_module(module)
    x = torch.randn(4, 4)
    assert torch.equal(made(Releases(), x)[0], module(Releases(), x)[0])


def test_items_of_a_list_belong_to_the_op_that_made_it():
    op_costs = graphs.Sketch()
    run, x = op_costs.input("run"), op_costs.input("x", 4, 4)
    both = op_costs.op(aten.max.dim, x, 0)
    set_step(op_costs.call_method("release", (run,)), CommStep(StepKind.RELEASE, 0))
    values = op_costs.op(operator.getitem, both, 0, name="values")
    module = op_costs.done(op_costs.op(aten.neg.default, values))
    part = sliced(module, ())
    assert next(r.outputs for r in part.regions.values()) == (values,)


def test_ranks_begin_with_different_regions_and_number_them_alike():
    order = []

    def compiler(bodies):
        order.extend(str(list(b.graph.nodes)[1].target) for b in bodies)
        return interpreted(bodies)

    module = chain([aten.relu.default], [aten.sin.default], [aten.cos.default], [aten.neg.default])
    names = []
    for turn in (0.0, 0.5):
        artifacts = Artifacts(compiler, turn)
        compile_missing([sliced(module, ())], artifacts)
        names.append([(key, call.__name__) for key, call in artifacts.by_key.items()])
    assert names[0] == names[1]
    assert order[:4] == [*order[6:], *order[4:6]]
