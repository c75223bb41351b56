"""Which values a copy of the same sizes and strides stands for, memory and all."""

import torch
from graphs import aten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphshard.graph.owners import fills_memory


@st.composite
def shown(draw):
    """A view of some memory: whole, turned, cut, widened, or of other strides altogether."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    value = torch.empty(sizes)
    value = value.permute(draw(st.permutations(range(len(sizes)))))
    match draw(st.sampled_from(["as it is", "cut", "widened", "strides", "added dim"])):
        case "cut":
            dim = draw(st.integers(0, value.ndim - 1))
            start = draw(st.integers(0, value.shape[dim] - 1))
            value = value.narrow(dim, start, draw(st.integers(1, value.shape[dim] - start)))
        case "widened":
            value = value.unsqueeze(0).expand(draw(st.integers(1, 3)), *value.shape)
        case "strides":
            strides = [draw(st.integers(0, 9)) for _ in sizes]
            whole = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            value = torch.empty(whole + draw(st.integers(0, 2))).as_strided(sizes, strides)
        case "added dim":
            value = value.unsqueeze(draw(st.integers(0, value.ndim)))
    return value


@settings(deadline=None, max_examples=200)
@given(value=shown())
def test_a_value_fills_its_memory_if_each_element_of_it_is_shown_once(value):
    node = fx.Graph().call_function(aten.relu.default)
    node.meta["val"] = value
    whole = value.untyped_storage().nbytes() // value.itemsize
    places = torch.arange(whole).as_strided(value.size(), value.stride(), value.storage_offset())
    assert fills_memory(node) is (sorted(places.flatten().tolist()) == list(range(whole)))
