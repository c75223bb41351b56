"""The optimizer in the step: its passes over memory, what it keeps, where it is shown."""

import json
from dataclasses import replace

import pytest
import torch
from forecasts import as_predicted, planned
from planning import layers
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from graphshard.cost.optimizer import (
    BYTES_PER_EIGHT_BIT_ELEMENT,
    CLIP_PASSES,
    EIGHT_BIT_STATES,
    PASSES,
    STATES,
    Optimizer,
    Stepped,
    optimizer_us,
    state_bytes,
)
from graphshard.cost.presets import preset
from graphshard.errors import OptionsError
from graphshard.options import _CHOICES, Options, parse_options
from graphshard.schedule.plan import Category, OptimizerKind, OptimizerStep, Plan
from graphshard.view.diff import OPTIMIZER, REST, diff
from graphshard.view.diff_text import diff_text
from graphshard.view.headline import headline
from graphshard.view.html import render
from graphshard.view.log_text import log_text
from graphshard.view.sheet import sheet_of
from graphshard.view.summary import summary_lines
from graphshard.view.units import time_text

HARDWARE = "h100-ib400"
NUMEL = 8_192


def made(kind, parameter):
    optim = torch.optim
    return {
        OptimizerKind.ADAMW: lambda: optim.AdamW([parameter], foreach=True),
        OptimizerKind.ADAMW_FUSED: lambda: optim.AdamW([parameter], fused=True),
        OptimizerKind.SGD: lambda: optim.SGD([parameter], foreach=True),
        OptimizerKind.SGD_MOMENTUM: lambda: optim.SGD([parameter], momentum=0.9, foreach=True),
    }[kind]()


class Passes(TorchDispatchMode):
    """Counts the tensors of `numel` elements that ops read and write.

    Written is what has other contents afterwards: a fused kernel may write gradients too, but
    does so only to unscale them.
    """

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = torch.utils._pytree.tree_leaves((args, kwargs))
        large = {id(t): t for t in read if isinstance(t, torch.Tensor) and t.numel() == self.numel}
        before = {key: t.clone() for key, t in large.items()}
        out = func(*args, **(kwargs or {}))
        changed = sum(not torch.equal(t, before[key]) for key, t in large.items())
        leaves = torch.utils._pytree.tree_leaves(out)
        new = {id(t) for t in leaves if isinstance(t, torch.Tensor) and t.numel() == self.numel}
        self.count += len(large) + changed + len(new - large.keys())
        return out


def stepped(kind):
    """A parameter, and its optimizer after a first step, which makes its state."""
    parameter = nn.Parameter(torch.randn(NUMEL))
    parameter.grad = torch.randn(NUMEL)
    optimizer = made(kind, parameter)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("kind", [kind for kind in OptimizerKind if kind != "adamw_8bit"])
def test_passes_are_those_of_torch(kind):
    parameter, optimizer = stepped(kind)
    with Passes(NUMEL) as step:
        optimizer.step()
    assert step.count == PASSES[kind]
    kept = [t for t in optimizer.state[parameter].values() if t is not None and t.numel() == NUMEL]
    assert len(kept) == STATES[kind]


def test_passes_of_clipping_are_those_of_torch():
    parameter, _ = stepped(OptimizerKind.ADAMW)
    with Passes(NUMEL) as clip:
        nn.utils.clip_grad_norm_([parameter], 0.1, foreach=True)
    assert clip.count == CLIP_PASSES


def test_passes_on_the_host_are_the_same():
    """Where torch does not take its foreach kernels by itself: on the CPU."""
    parameter, _ = stepped(OptimizerKind.ADAMW)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    with Passes(NUMEL) as step:
        optimizer.step()
    assert step.count == PASSES[OptimizerKind.ADAMW]


def test_states_of_8_bits_are_torchaos():
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    state = subclass.OptimState8bit.zeros((NUMEL,), signed=True, block_size=256)
    kept = state.codes.nbytes + state.scale.nbytes
    assert kept == BYTES_PER_EIGHT_BIT_ELEMENT * NUMEL
    shards = Stepped(4 * NUMEL, NUMEL)
    assert state_bytes(OptimizerKind.ADAMW_8BIT, shards) == EIGHT_BIT_STATES * kept


def test_a_step_takes_its_bytes_over_the_bandwidth():
    h100, shards = preset("h100").processor, Stepped(8.03e9 * 4 / 8, 8.03e9 / 8)
    us = {kind: optimizer_us(h100, Optimizer(kind), shards) for kind in OptimizerKind}
    rate = 0.85 * 3.35e12 / 1e6
    assert us[OptimizerKind.ADAMW] == pytest.approx(20 * shards.bytes / rate, rel=1e-3)
    eight_bit = 3 * shards.bytes + 2 * 2 * shards.numel * (1 + 1 / 64)
    assert us[OptimizerKind.ADAMW_8BIT] == pytest.approx(eight_bit / rate, rel=1e-3)
    order = ["sgd", "adamw_8bit", "adamw_fused", "sgd_momentum", "adamw"]
    assert sorted(us, key=us.get) == order
    for kind in OptimizerKind:
        clipped = optimizer_us(h100, Optimizer(kind, clips=True), shards)
        assert clipped - us[kind] == pytest.approx(3 * shards.bytes / rate, rel=1e-3)


# -- in plans ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def sharded(**policy):
    def shard(model):
        for part in (model.first, model.second, model):
            fully_shard(part, **policy)

    return shard


def plan_of(dim=256, shard=None, frozen=(), **more):
    def build():
        model = Net(dim)
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        return model

    with torch.device("meta"):
        model = build()
    x = torch.empty(4, dim, device="meta")
    shard = shard or sharded()
    return graphshard.plan(model, x, world_size=8, hardware=HARDWARE, shard=shard, **more)


NUMBERS = 2 * (256 * 256 + 256)  # elements of the model
RATE = 0.85 * 3.35e12 / 1e6


def test_the_step_has_the_optimizer_of_the_shards():
    estimate = plan_of().estimate
    assert estimate.optimizer.kind is OptimizerKind.ADAMW
    assert not estimate.optimizer.clips
    assert estimate.optimizer_us == pytest.approx(5 + 20 * 4 * NUMBERS / 8 / RATE)
    assert estimate.whole_step_us == estimate.step_time_us + estimate.optimizer_us
    assert estimate.whole_fsdp2_us == estimate.fsdp2.step_time_us + estimate.optimizer_us
    bound = estimate.lower_bound_us + estimate.optimizer_us
    assert estimate.gap == pytest.approx(estimate.whole_step_us / bound - 1)


@pytest.mark.parametrize("kind", OptimizerKind)
def test_another_optimizer_changes_its_part_alone(kind):
    usual, other = plan_of().estimate, plan_of(optimizer=kind.value, clip=True).estimate
    assert (other.optimizer.kind, other.optimizer.clips) == (kind, True)
    shards = Stepped(4 * NUMBERS / 8, NUMBERS / 8)
    expected = optimizer_us(preset(HARDWARE).processor, Optimizer(kind, clips=True), shards)
    assert other.optimizer_us == pytest.approx(expected)
    assert other.step_time_us == usual.step_time_us
    held = dict(other.ours.peak_by_category).get(Category.OPT_STATE, 0)
    assert held == pytest.approx(state_bytes(kind, shards), abs=3)
    rest = other.peak_bytes - held
    assert rest == usual.peak_bytes - dict(usual.ours.peak_by_category)[Category.OPT_STATE]


def test_once_for_all_micro_steps():
    one, four = plan_of().estimate, plan_of(micro_steps=4).estimate
    assert four.optimizer == one.optimizer
    assert four.step_time_us > one.step_time_us


def test_what_is_frozen_is_not_stepped():
    half = plan_of(frozen=["first"]).estimate
    assert half.optimizer_us - 5 == pytest.approx((plan_of().estimate.optimizer_us - 5) / 2)


def test_fsdp2s_own_schedule_has_the_same():
    estimate = plan_of(schedule="fsdp2", optimizer="sgd", clip=True).estimate
    assert estimate.optimizer == plan_of(optimizer="sgd", clip=True).estimate.optimizer


def test_the_host_steps_what_it_has():
    """At the rate of one CPU thread; nothing of it is in the device's memory."""
    away = plan_of(shard=sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))).estimate
    cpu = preset("cpu").processor
    shards = Stepped(4 * NUMBERS / 8, NUMBERS / 8)
    assert away.optimizer_us == pytest.approx(optimizer_us(cpu, Optimizer(), shards))
    assert Category.OPT_STATE not in dict(away.ours.peak_by_category)


def test_a_plan_of_before_opens_without_one():
    plan = plan_of()
    data = json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    del data["estimate"]["optimizer"]
    old = Plan.from_json(json.dumps(data)).estimate
    assert old.optimizer is None
    assert old.whole_step_us == old.step_time_us == plan.estimate.step_time_us
    bound = plan.estimate.lower_bound_us
    assert old.gap == pytest.approx(plan.estimate.step_time_us / bound - 1)


def test_options():
    assert _CHOICES["optimizer"] == tuple(OptimizerKind)
    assert Options().optimizer == OptimizerKind.ADAMW
    given = parse_options({"optimizer": "adamw_8bit", "clip": True}, elsewhere={})
    assert (given.optimizer, given.clip) == ("adamw_8bit", True)
    assert {"optimizer": "adamw_8bit", "clip": True}.items() <= given.terms().items()
    with pytest.raises(OptionsError, match=r"GS103: option optimizer='lion'; choose one of"):
        parse_options({"optimizer": "lion"})
    with pytest.raises(OptionsError, match=r"GS103: option clip='no'"):
        parse_options({"clip": "no"})


# -- on screens ----------------------------------------------------------------------------


def with_optimizer(plan, us, clips=False):
    step = OptimizerStep(OptimizerKind.ADAMW, clips, us)
    return replace(plan, estimate=replace(plan.estimate, optimizer=step))


def test_a_difference_has_the_optimizers_part():
    before, after = (
        with_optimizer(planned(layers(3)), 500.0),
        with_optimizer(planned(layers(3)), 175.0),
    )
    found = diff(before, after)
    assert found.step_time_us.name == "step time"
    assert found.step_time_us.change == pytest.approx(-325.0)
    parts = {part.kind: part for part in found.contributions}
    assert parts[OPTIMIZER].change_us == -325.0
    assert sum(part.change_us for part in found.contributions) == pytest.approx(-325.0)
    assert REST not in parts
    assert "optimizer, adamw" in diff_text(found)


def test_a_difference_to_a_plan_without_one_is_of_forward_and_backward():
    plan = planned(layers(3))
    found = diff(plan, with_optimizer(plan, 500.0))
    assert found.step_time_us.change == 0
    assert "forward and backward " in diff_text(found)
    assert "step time" not in diff_text(found)


def test_the_log_says_what_was_measured_of_the_step():
    plan = planned(layers(3))
    estimate = plan.estimate
    lines = log_text(with_optimizer(plan, estimate.step_time_us)).splitlines()
    whole, passes = (line for line in lines if "predicted: " in line)
    assert "of it optimizer" in whole
    assert "(50.0 %)" in whole
    assert passes.startswith("  predicted: forward and backward ")


def test_the_viewer_shows_the_whole_step():
    plan = planned(layers(3))
    plan = with_optimizer(plan, plan.estimate.step_time_us, clips=True)
    estimate, found = plan.estimate, as_predicted(plan)
    step, exposed, _, bound = headline(sheet_of(plan, found))
    passes, whole, half = (
        time_text(us)
        for us in (estimate.step_time_us, estimate.whole_step_us, estimate.optimizer_us)
    )
    assert step.value == whole
    beside = {one.name: one.value for one in step.beside}
    assert beside["FSDP2"] == time_text(estimate.whole_fsdp2_us)
    assert beside["of it optimizer"] == f"{half} (50.0 %)"
    assert beside["measured without it"] == f"{time_text(found.step_time_us)}, predicted {passes}"
    assert {one.name: one.value for one in exposed.beside}["measured"] == time_text(
        found.exposed_us
    )
    assert bound.value == time_text(estimate.whole_bound_us)
    assert ": optimizer" in render(plan)
    assert ": optimizer" not in render(planned(layers(3)))


def test_the_summary_has_the_step():
    plan = planned(layers(3))
    passes = time_text(plan.estimate.step_time_us)
    assert f"\nstep         {passes} predicted; FSDP2 " in summary_lines(plan)
    plan = with_optimizer(plan, plan.estimate.step_time_us)
    whole = time_text(plan.estimate.whole_step_us)
    text = " ".join(summary_lines(plan).split())
    assert f"step {whole} predicted; FSDP2 " in text
    assert f"; of it optimizer {passes} (50.0 %)" in text
    measured = replace(plan, measured=as_predicted(plan))
    assert f"\nmeasured     {passes} without the optimizer; exposed " in summary_lines(measured)
