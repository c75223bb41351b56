"""The planner decides in the place of the user's checkpoints, where their policy leaves it open."""

import functools

import pytest
from offline_models import llama
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.compiler.partition import released
from graphshard.compiler.planning_inputs import policy_of
from graphshard.cost.presets import preset
from graphshard.offline.capture import capture
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.offline.world import faked, pretended
from graphshard.options import parse_options
from graphshard.view.recomputed import recomputed_text

DEPTH = 4  # few enough to be captured whole


@functools.cache
def captured(how):
    with pretended(8):
        build = functools.partial(llama, how, DEPTH)
        return capture(faked(lambda: made_of("net", build())), "net").joint_graph


def policies(joint_graph):
    """Of the user: what only gathers parameters again is ours."""
    found = (node.meta.get("recompute") for node in joint_graph.program.joint.graph.nodes)
    return {policy for policy in found if policy is not None}


def point_of(**options):
    machine = preset("h100")
    policy = policy_of(parse_options(options, elsewhere={}), machine)
    return Point(8, 8, machine, policy, fused=True)


@functools.cache
def studied(how):
    """Captured once for all options."""
    build = functools.partial(llama, how, DEPTH)
    study = Study("net", lambda sizes: made_of("net", build()), (point_of(),))
    study.prepare()
    return study


@functools.cache
def planned(how, **options):
    return studied(how).answer(point_of(**options)).plan


def peak_bytes(plan):
    return plan.estimate.ours.peak_bytes


def test_what_the_user_insists_on_stays():
    must = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE}
    selective = captured("selective")
    assert policies(selective) == {*must, CheckpointPolicy.PREFER_RECOMPUTE}
    free = released(selective)
    assert free.checkpoints == DEPTH
    assert free.checkpointed
    assert policies(free) == must
    assert policies(selective) != must  # it is a copy


def test_without_checkpoints_there_is_nothing_to_replace():
    assert captured("none").checkpoints == 0
    assert released(captured("none")) is None


def test_with_room_nothing_is_computed_again():
    theirs, ours = planned("full"), planned("full", memory_budget="10GiB")
    assert not theirs.recompute.replaced
    assert theirs.recompute.checkpoints == ours.recompute.checkpoints == DEPTH
    assert ours.recompute.replaced
    assert ours.recompute.activations == ()
    assert ours.estimate.ours.step_time_us < theirs.estimate.ours.step_time_us
    assert ours.estimate.fsdp2 == theirs.estimate.fsdp2
    free = planned("none", memory_budget="10GiB")
    assert ours.estimate.ours == free.estimate.ours


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_between_full_and_none_the_plan_takes_what_fits(share):
    """Never slower than what the user has, which fits each of these budgets."""
    full, none = planned("full"), planned("none")
    budget = int(peak_bytes(full) + share * (peak_bytes(none) - peak_bytes(full)))
    ours = planned("full", memory_budget=budget)
    assert peak_bytes(ours) <= budget
    assert ours.estimate.ours.step_time_us <= full.estimate.ours.step_time_us
    assert planned("full", memory_budget=budget, recompute="user").recompute.replaced is False


def test_within_fsdp2s_own_peak_only_if_asked():
    asked = planned("full", recompute="auto")
    assert asked.estimate.budget_bytes == asked.estimate.fsdp2.peak_bytes
    assert asked.estimate.fsdp2 == planned("full").estimate.fsdp2


def test_it_is_said():
    theirs, ours = planned("full"), planned("full", memory_budget="10GiB")
    assert recomputed_text(theirs) == f"{DEPTH} checkpointed regions as the model has them"
    text = recomputed_text(ours)
    assert text.startswith(f"{DEPTH} checkpointed regions replaced by the plan ")
    assert "(nothing computed again): in FSDP2's order " in text
    assert " less a step, " in text
    assert text.endswith(" more memory")
    assert recomputed_text(planned("none")) == ""
