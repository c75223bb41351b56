"""Attention without dropout draws nothing; what is random is priced when it is computed again."""

import pytest
import torch
from graphs import Sketch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphshard.compiler.partition import parts_of
from graphshard.graph.program import compute_nodes, copy_of
from graphshard.graph.random_ops import is_random, with_tags, without_tags, wrapped_op
from graphshard.offline.capture import capture
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, pretended
from graphshard.pricing.flops import graph_work
from graphshard.pricing.liveness import tensor_bytes

aten = torch.ops.aten
DIM = 16


class Attention(nn.Module):
    """Computed again in backward; noise: it draws numbers, too."""

    def __init__(self, dropout, noise):
        super().__init__()
        self.inner = nn.Linear(DIM, 3 * DIM)
        self.dropout, self.noise = dropout, noise

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False)

    def mix(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x * torch.rand_like(x).tanh() if self.noise else x


class Net(nn.Module):
    def __init__(self, dropout, noise):
        super().__init__()
        self.embedding = nn.Embedding(32, DIM)
        self.blocks = nn.ModuleList(Attention(dropout, noise) for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).sin()
        return self.head(x).sum()


def partition(dropout=0.0, *, noise=False, fused=False):
    def build():
        model = Net(dropout, noise)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, (torch.zeros(2, 8, dtype=torch.int64),)

    with pretended(8):
        joint = capture(faked(lambda: made_of("net", build())), "net").joint_graph
        return parts_of(joint, copy_of(joint.program.joint), fused=fused)


def attention_flops(graph):
    """Of each attention that a graph computes, backward's own aside."""
    pairs = zip(compute_nodes(graph), graph_work(graph), strict=True)
    named = [(str(wrapped_op(node)[0]), work) for node, work in pairs]
    return [w.flops for name, w in named if "scaled_dot" in name and "backward" not in name]


def is_wrapper(node):
    return isinstance(node.target, torch._ops.HigherOrderOperator)


@pytest.mark.parametrize("fused", [False, True], ids=["aten", "inductor"])
def test_attention_without_dropout_is_repeated_as_it_is(fused):
    parts = partition(fused=fused)
    for graph in (parts.forward.graph, parts.backward.graph):
        assert [flops > 0 for flops in attention_flops(graph)] == [True, True]
        called = [node.target for node in graph.nodes if "scaled_dot" in str(node.target)]
        assert all(isinstance(op, torch._ops.OpOverload) for op in called)
        assert not any(map(is_wrapper, graph.nodes))


def test_what_torch_wraps_costs_what_it_costs_alone():
    """Attention with dropout, with its random state kept for backward, and drawn again there."""
    graph = Sketch()
    heads = [graph.input(name, 1, 2, 8, 16) for name in "qkv"]
    state = graph.input("state", 100)
    op, given = aten._scaled_dot_product_flash_attention_for_cpu.default, (*heads, 0.5)
    alone = graph.call_function(op, given)
    alone.meta["val"] = (heads[0].meta["val"],) * 2
    wrappers = torch.ops.higher_order
    kept = graph.call_function(wrappers.run_and_save_rng_state, (op, *given))
    drawn = graph.call_function(wrappers.run_with_rng_state, (state, op, *given))
    graph.done(alone, kept, drawn)
    assert attention_flops(graph) == [attention_flops(graph)[0]] * 3 != [0] * 3


def test_what_a_wrapper_yields_has_a_value():
    """Random numbers that backward draws again take memory there."""
    graph = partition(noise=True).backward.graph
    again = [n for n in graph.nodes if is_wrapper(n) and "rand" in str(n.args)]
    assert [tensor_bytes(node) for node in again] == [4 * 2 * 8 * DIM] * 2


@pytest.mark.parametrize("given", [(0.0,), (), (0.1,)], ids=["0", "default", "0.1"])
def test_only_dropout_makes_attention_random(given):
    graph = Sketch()
    heads = [graph.input(name, 1, 2, 8, 16) for name in "qkv"]
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    attention = graph.op(op, *heads, *given)
    drawn = graph.op(aten.rand_like.default, heads[0])
    assert [is_random(node) for node in (attention, drawn)] == [given == (0.1,), True]
    hidden = without_tags(graph)
    assert list(hidden) == [attention.name] * (given != (0.1,))
    assert drawn.target is aten.rand_like.default
    with_tags(graph, hidden)
    assert attention.target is op
