"""Gathered parameters: views that are made once, memory that comes and goes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphshard.capture.root_state import root_states_under
from graphshard.offline.world import pretended
from graphshard.runtime.gather_buffers import (
    GatherBuffer,
    GatherLayout,
    buffer_for,
    give_back,
    layout_of,
    own_buffer,
    parameters,
)
from graphshard.runtime.live import LiveGroup


@pytest.fixture
def model():
    """A sharded layer on one rank, which has run once. Its parameters are cast."""
    with pretended(1):
        made = nn.Sequential(nn.Linear(4, 3))
        fully_shard(made[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        options = {"fallback": "error", "verify": "off"}
        fully_shard(made).compile(backend="graphshard", options=options)
        made(torch.ones(2, 4)).sum().backward()
        yield made
        torch._dynamo.reset()


def live_of(model: nn.Module) -> LiveGroup:
    return next(live for live in root_states_under(model)[0].groups if live.fqn == "0")


def layout(live: LiveGroup) -> GatherLayout:
    return layout_of(live, live.places, live.dtypes, 1)


def held_bytes(buffer: GatherBuffer) -> int:
    return sum(storage.nbytes() for storage in buffer.storages)


def test_a_step_leaves_a_buffer_without_memory(model):
    (buffer,) = live_of(model).buffers.values()
    assert held_bytes(buffer) == 0


def test_the_next_step_uses_the_same_buffer(model):
    (before,) = live_of(model).buffers.values()
    model(torch.ones(2, 4)).sum().backward()
    assert list(live_of(model).buffers.values()) == [before]


def test_a_buffer_has_each_parameter_in_its_size(model):
    live = live_of(model)
    buffer = buffer_for(live, layout(live))
    assert held_bytes(buffer) == 2 * (12 + 3)
    views = parameters(live, buffer)
    assert [tuple(views[i].shape) for i in live.places] == [(3, 4), (3,)]


def test_two_gathers_at_once_have_two_buffers(model):
    live = live_of(model)
    first, second = (buffer_for(live, layout(live)) for _ in range(2))
    assert first.flats[0].data_ptr() != second.flats[0].data_ptr()


def test_memory_that_somebody_looks_at_stays(model):
    live = live_of(model)
    buffer = buffer_for(live, layout(live))
    buffer.flats[0].fill_(7.0)
    view = parameters(live, buffer)[0].t()
    give_back(live, buffer)
    assert live.buffers == {}
    assert torch.equal(view, torch.full((4, 3), 7.0, dtype=torch.bfloat16))


def test_one_rank_reads_its_shards_where_they_are(model):
    live = live_of(model)
    own = layout_of(live, live.places, (torch.float32, torch.float32), 1)
    shards = live.shards()
    buffer = own_buffer(live, own, shards)
    assert [view.data_ptr() for view in parameters(live, buffer).values()] == [
        shard.data_ptr() for shard in shards
    ]
    give_back(live, buffer)
    assert own_buffer(live, own, live.shards()) is buffer
    assert own_buffer(live, layout(live), shards) is None, "these are cast"


def test_replaced_shards_are_read_where_they_are_now(model):
    live = live_of(model)
    own = layout_of(live, live.places, (torch.float32, torch.float32), 1)
    before = own_buffer(live, own, live.shards())
    moved = [shard.clone() for shard in live.shards()]
    after = own_buffer(live, own, moved)
    assert after is not before
    assert [f.data_ptr() for f in after.wholes] == [shard.data_ptr() for shard in moved]


def test_a_buffer_of_an_inference_serves_a_training_step(model):
    live = live_of(model)
    live.buffers.clear()
    with torch.inference_mode():
        give_back(live, buffer_for(live, layout(live)))
    (buffer,) = live.buffers.values()
    model(torch.ones(2, 4)).sum().backward()
    assert list(live.buffers.values()) == [buffer]
