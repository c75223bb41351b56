"""What sizes count as that data decides."""

from collections.abc import Iterator

import pytest
import torch
from graphs import aten
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.graph.owners import fills_memory
from graphshard.graph.program import Program
from graphshard.offline.concrete import concrete
from graphshard.pricing.sizes import NO_HINT, Sizes


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """It finds sizes that data decides, and leaves no guard."""
    shape_env = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    with FakeTensorMode(shape_env=shape_env) as fake:
        yield fake
    assert not shape_env.guards


def shown(value: Tensor) -> fx.Node:
    node = fx.Graph().call_function(aten.relu.default)
    node.meta["val"] = value
    return node


def test_a_size_that_data_decides_counts_as_the_most_that_it_can_be(mode: FakeTensorMode) -> None:
    rows = torch.ones(3, 4).nonzero()
    sizes = Sizes()
    assert sizes.shape(rows) == (12, 2)
    assert sizes.shape(torch.cat([rows, rows])) == (24, 2)
    assert sizes.bytes(rows) == 12 * 2 * 8


def test_a_size_that_nothing_bounds_counts_as_one(mode: FakeTensorMode) -> None:
    length = torch.ones(3).sum().long().item()
    torch._check(length >= 0)
    assert Sizes().shape(torch.ones(length, 5)) == (NO_HINT, 5)


def test_what_fills_its_memory_is_known_of_sizes_that_data_decides(mode: FakeTensorMode) -> None:
    rows = torch.ones(3, 4).nonzero()
    assert fills_memory(shown(rows))
    assert fills_memory(shown(rows.t()))
    assert not fills_memory(shown(rows[:, :1]))


def test_numbers_for_other_symbols_leave_it_at_that(mode: FakeTensorMode) -> None:
    node = shown(torch.ones(3, 4).nonzero())
    node.graph.output((node,))
    program = Program("masked", (), 1, forward=fx.GraphModule({}, node.graph))
    found, _ = concrete(program, {"s0": 7}).forward.graph.nodes
    assert found.meta["val"].shape == (12, 2)
