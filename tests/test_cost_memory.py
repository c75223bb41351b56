"""Bytes by category: by hand, uneven shards, one rank, frozen parameters."""

import pytest

from graphshard.cost.memory import (
    OPTIMIZERS,
    Category,
    ParamFacts,
    by_category,
    group_bytes,
    padded_shard_numel,
    params_of,
    total_bytes,
)
from graphshard.schedule.plan import GroupInfo, ParamInfo

ADAMW = OPTIMIZERS["adamw"]
# bfloat16 compute on float32 shards, gradients reduced in float32. 7 rows on 2 ranks are padded.
WEIGHT = ParamFacts((7, 3), item_bytes=4, gather_bytes=2, reduce_bytes=4)
FROZEN = ParamFacts((4,), item_bytes=4, gather_bytes=2, reduce_bytes=4, trainable=False)


def test_a_group_by_hand():
    found = group_bytes([WEIGHT, FROZEN], 2, ADAMW)
    shard, frozen = 4 * 3, 2
    assert found.sharded_param == 4 * (shard + frozen)
    assert found.sharded_grad == 4 * shard
    assert found.opt_state == 2 * 4 * shard + 4
    assert found.unsharded_param == found.all_gather == 2 * 2 * (shard + frozen)
    assert found.unsharded_grad == 2 * 7 * 3
    assert found.reduce_scatter == 2 * 4 * shard
    assert found.reduce_output == 4 * shard
    assert found.resident == 4 * (shard + frozen) + 3 * 4 * shard + 4


def test_one_rank_has_no_buckets():
    found = group_bytes([WEIGHT], 1, OPTIMIZERS["sgd"])
    assert (found.all_gather, found.reduce_scatter, found.opt_state) == (0, 0, 0)
    assert found.unsharded_param == 2 * 21


@pytest.mark.parametrize(("world", "rows"), [(1, 7), (2, 4), (4, 2), (8, 1), (100, 1)])
def test_padding_is_that_of_chunk(world, rows):
    assert padded_shard_numel(WEIGHT, world) == rows * 3


def test_another_shard_dimension():
    param = ParamFacts((5, 8, 3), 4, 4, 4, shard_dim=1)
    assert padded_shard_numel(param, 4) == 5 * 2 * 3


def test_totals_and_names():
    one = group_bytes([WEIGHT], 2, ADAMW)
    total = by_category(total_bytes([one, one]))
    assert total[Category.SHARDED_PARAM] == 2 * one.sharded_param
    assert set(total) < set(Category)


def test_names_are_those_of_fsdp_mem_tracker():
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPRefType

    assert {c.value for c in Category} == {t.value for t in _FSDPRefType}


def test_a_planned_group():
    weight = ParamInfo("weight", (7, 3), "bfloat16", True, 48)
    group = GroupInfo(0, "layers.0", (weight,), 2, True, 48)
    assert params_of(group, stored_dtype="float32", reduce_dtype="float32") == (WEIGHT,)
    assert group_bytes(params_of(group), 2, ADAMW).unsharded_param == group.gathered_bytes
