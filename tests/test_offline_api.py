"""`graphshard.plan`: what it takes, and that the model stays as it is."""

import functools

import pytest
import torch
from offline_models import HARDWARE, Block, Net, shard, tokens
from torch import nn

import graphshard
from graphshard.errors import CaptureError, InfeasibleBudget, OfflineError
from graphshard.offline.world import pretended
from graphshard.schedule.plan import Plan


def unsharded(depth=2):
    with torch.device("meta"):
        return Net(nn.ModuleList(Block() for _ in range(depth)))


def plan_of(model, inputs, **settings):
    settings = {"world_size": 8, "hardware": HARDWARE, **settings}
    return graphshard.plan(model, inputs, **settings)


def test_a_model_with_shard_and_a_function_have_the_same_plan():
    def sharded():
        model = Net(nn.ModuleList(Block() for _ in range(2)))
        shard(model)
        return model

    found = plan_of(unsharded(), tokens(), shard=shard)
    assert found == plan_of(sharded, (tokens(),))
    assert found == plan_of(sharded, {"tokens": tokens()})
    assert found == plan_of(functools.partial(unsharded, 2), [tokens()], shard=shard)
    assert Plan.from_json(found.to_json()) == found
    assert found.name == "plan"
    assert [g.fqn for g in found.groups] == ["(root)", "blocks.0", "blocks.1"]
    assert found.priced_on.machine == HARDWARE


def test_the_model_stays_as_it_is():
    model = unsharded()
    before = {name: (id(p), type(p), p.device) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    plan_of(model, tokens(), shard=shard)
    assert {n: (id(p), type(p), p.device) for n, p in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == kinds
    assert not torch.distributed.is_initialized()


def test_a_budget_is_kept_and_one_that_nothing_fits_is_an_error():
    free = plan_of(unsharded(), tokens(), shard=shard)
    budget = free.estimate.fsdp2.peak_bytes + 4096
    bound = plan_of(unsharded(), tokens(), shard=shard, memory_budget=budget)
    assert bound.estimate.peak_bytes <= budget == bound.estimate.budget_bytes
    with pytest.raises(InfeasibleBudget, match="GS601: no schedule fits"):
        plan_of(unsharded(), tokens(), shard=shard, memory_budget="1KiB")


def test_inside_a_process_group():
    with pretended(2), pytest.raises(OfflineError, match="GS901: this process is part of"):
        plan_of(unsharded(), tokens(), shard=shard)


def test_a_model_with_data():
    with pytest.raises(OfflineError, match=r"GS902: parameter embedding\.weight holds data"):
        plan_of(Net(nn.ModuleList()), tokens(), shard=shard)


def test_a_model_that_is_sharded_already():
    with pretended(2):
        model = unsharded()
        shard(model)
    with pytest.raises(OfflineError, match="GS909: the model is sharded already"):
        plan_of(model, tokens())


def test_a_model_that_nobody_shards():
    with pytest.raises(OfflineError, match="GS903: no module of Net is sharded"):
        plan_of(unsharded(), tokens())


def test_a_loss_without_parameters():
    with pytest.raises(CaptureError, match="GS910: "):
        plan_of(unsharded().requires_grad_(False), tokens(), shard=shard)
