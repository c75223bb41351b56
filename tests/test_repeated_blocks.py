"""Alike blocks are traced once; the joint graph is that of the whole model traced at once."""

import functools

import pytest
import torch
from offline_models import Block, Net, llama, net, two_rows
from torch import fx, nn
from torch.distributed.fsdp import fully_shard
from torch.fx.node import map_arg

from graphshard.capture.repeated import trace
from graphshard.capture.repeated.find import alike_ranges
from graphshard.offline.capture import capture
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, pretended


class Odd(Block):
    """Writes to its input, returns a view, or reads it twice: not traced once, or others are."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        y = super().forward(x)
        if self.how == "in place":
            y.add_(1)
        if self.how == "view":
            return y.view(-1, y.shape[-1]).view_as(y)
        if self.how == "dropout":
            return nn.functional.dropout(y, 0.5)
        return y


def odd(how):
    model = Net(nn.ModuleList(Odd(how) for _ in range(5)))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.zeros(2, 4, dtype=torch.int64)


def frozen():
    model, tokens = net(depth=6)
    model.blocks[2].requires_grad_(False)
    return model, tokens


def joint(build, by_blocks):
    with pretended(8):
        fake = faked(lambda: made_of("net", build()))
        return capture(fake, "net", by_blocks=by_blocks).joint_graph.program.joint.graph


def rows(graph: fx.Graph) -> list[str]:
    """The graph without names."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        args = map_arg((node.args, node.kwargs), number.__getitem__)
        value = node.meta.get("val")
        layout = (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else ""
        again = node.meta.get("recompute"), node.meta.get("ac_graph_id")
        target = "" if node.op in ("placeholder", "output") else node.target
        found.append(f"{node.op} {target} {args} {layout} {again}")
    return found


BUILDS = {
    "alike": functools.partial(net, depth=6),
    "nested groups": functools.partial(net, depth=6, nested=True),
    "two rows": two_rows,
    "no checkpoint": functools.partial(llama, "none"),
    "selective checkpoint": functools.partial(llama, "selective"),
    "checkpoint": functools.partial(llama, "full"),
    "one frozen block": frozen,
    "returns a view": functools.partial(odd, "view"),
    "dropout": functools.partial(odd, "dropout"),
}


@pytest.mark.parametrize("name", list(BUILDS))
def test_the_joint_graph_is_that_of_the_whole(name):
    whole, blocks = (rows(joint(BUILDS[name], by)) for by in (False, True))
    assert blocks == whole


def test_a_block_that_writes_to_its_own_results_has_the_same_ops():
    """Views are made again after a write, which may happen earlier or later."""
    build = functools.partial(odd, "in place")
    graphs = [joint(build, by) for by in (False, True)]
    whole, blocks = (sorted(f"{n.op} {n.target}" for n in graph.nodes) for graph in graphs)
    assert [t for t in blocks if "placeholder" not in t] == [
        t for t in whole if "placeholder" not in t
    ]


def test_blocks_are_found_and_traced_once(monkeypatch):
    seen = []
    original = trace.alike_ranges

    def watched(graph):
        found = list(original(graph))
        seen.append([len(alike) for alike in found])
        return iter(found)

    monkeypatch.setattr(trace, "alike_ranges", watched)
    joint(functools.partial(net, depth=6), by_blocks=True)
    assert len(seen) == 1
    assert seen[0][0] >= 5


def test_few_or_different_stretches_are_no_pieces():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2)
    for target in (torch.relu, torch.neg, torch.exp) * 4:
        x = graph.call_function(target, (x,))
        x.meta["example_value"] = torch.empty(2)
    graph.output(x)
    # They repeat, but no group begins anywhere.
    assert list(alike_ranges(graph)) == []
