"""Plans whose compute is priced as a compiler fuses it."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.demo.llama import Config, Llama
from graphshard.errors import OptionsError
from graphshard.pricing.usage import GradReady, GroupUse, Usage
from graphshard.schedule.plan import Category, Direction, Plan

SMALL = Config(256, 6, 4, 512, num_kv_heads=2, vocabulary=512, recompute="none")


def planned(compute, config=SMALL, **more):
    with torch.device("meta"):
        model = Llama(config, 128)
        tokens, targets = torch.randint(config.vocabulary, (2, 4, 128))

    def shard(model):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    return graphshard.plan(
        model,
        (tokens, targets),
        world_size=8,
        hardware="h100",
        compute=compute,
        shard=shard,
        **more,
    )


@pytest.fixture(scope="module")
def plans():
    return {compute: planned(compute, schedule="fsdp2") for compute in ("aten", "inductor")}


def test_fused_compute_is_faster_and_saves_less(plans):
    aten, fused = (plans[name].estimate.fsdp2 for name in ("aten", "inductor"))
    assert fused.step_time_us < aten.step_time_us
    assert fused.peak_bytes < 0.9 * aten.peak_bytes


def test_fusing_changes_no_collective(plans):
    assert plans["aten"].fingerprint == plans["inductor"].fingerprint


def test_the_plan_says_how_it_was_priced(plans):
    assert [plan.priced_on.fused for plan in plans.values()] == [False, True]
    fused = plans["inductor"]
    assert Plan.from_json(fused.to_json()).priced_on == fused.priced_on


def test_beside_what_is_computed_again_no_more_is_saved(plans):
    """Of the choice's own forecast: what Inductor does not save is not saved then either."""
    own = plans["inductor"].estimate.fsdp2
    tight = planned("inductor", memory_budget=int(0.9 * own.peak_bytes), offload="never")
    assert tight.recompute.activations
    assert tight.estimate.peak_bytes <= 0.9 * own.peak_bytes
    saved = dict(tight.estimate.ours.peak_by_category)[Category.ACTIVATION]
    assert saved < dict(own.peak_by_category)[Category.ACTIVATION]


def test_with_checkpointing_the_user_decides_what_is_saved():
    config = replace(SMALL, recompute="full")
    aten, fused = (planned(name, config).estimate.fsdp2 for name in ("aten", "inductor"))
    # What stays inside fused kernels is not there; what one of them writes is there at once.
    assert fused.peak_bytes == pytest.approx(aten.peak_bytes, rel=0.1)


def test_another_way_to_compute_is_refused():
    with pytest.raises(OptionsError, match=r"GS103.*'eager'.*aten.*inductor"):
        planned("eager")


def test_regions_start_where_something_is_communicated():
    uses = (GroupUse(0, 0, 3), GroupUse(1, 3, None))
    made = Usage(Direction.BACKWARD, 9, uses, (GradReady(0, 6),))
    assert made.cuts == (0, 3, 4, 7, 9)
