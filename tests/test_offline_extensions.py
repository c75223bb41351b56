"""Planning offline what has all-gather extensions: the bytes that travel are theirs."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import graphshard
from graphshard.offline.repeats import CAPTURED

RANKS, WIDTH = 16, 64


def float8_model() -> nn.Module:
    """More alike blocks than are captured, so that the others' groups are described unseen."""
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(CAPTURED + 2)
    )
    model = nn.Sequential(*blocks)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    return model


@pytest.mark.parametrize("world", [RANKS, 4 * RANKS])
def test_float8_weights_travel_as_bytes(world: int) -> None:
    plan = graphshard.plan(
        float8_model, (torch.randn(4, WIDTH),), world_size=world, hardware="h100-ib400"
    )
    assert len(plan.groups) == CAPTURED + 2
    for group in plan.groups:
        weights = [p for p in group.params if p.fqn.endswith("weight")]
        biases = [p for p in group.params if p.fqn.endswith("bias")]
        assert [p.gathered_bytes for p in weights] == [p.numel for p in weights]
        assert [p.gathered_bytes for p in biases] == [2 * p.numel for p in biases]
        assert all(p.held_bytes >= p.numel and p.grad_bytes == 2 * p.numel for p in weights)
        assert group.reduce_bytes == 4 * sum(p.numel for p in group.params)
