"""The doctor's judgement on recorded facts: lints, and the comparison of two runs."""

import json
import math
from dataclasses import replace

import pytest
from doctor_facts import MIB, changed, codes, facts, group, only, ranks, step

from graphshard.doctor import lints, verdict
from graphshard.doctor.examine import Examination
from graphshard.doctor.facts import Facts, Stack
from graphshard.doctor.findings import Level
from graphshard.doctor.text import examination_dict


def test_facts_travel_as_json():
    whole = facts(
        stacks=(Stack("layers", "Block", 3, 10, "(root)"),),
        direct_forwards=(("a", 1),),
        steps=(step(math.nan), step(a=(1.0,))),
        saves=(("x.pt", 2, 30),),
    )
    back = Facts.from_json(whole.to_json())
    assert math.isnan(back.steps[0].losses[0])
    assert replace(back, steps=back.steps[1:]) == replace(whole, steps=whole.steps[1:])


def test_a_loss_that_is_nan_in_one_run_only_stays_json():
    eager, ours = ranks(steps=(step(1.0),)), ranks("graphshard", steps=(step(math.nan),))
    found = Examination((), verdict.verdict_of(eager, ours), ())
    assert found.verdict.loss_difference == math.inf
    text = json.dumps(examination_dict(found), allow_nan=False)
    assert json.loads(text)["verdict"]["loss_difference"] is None


def test_nothing_is_found_where_nothing_is_wrong():
    assert lints.lint([ranks(), ranks("graphshard")]) == ()
    assert verdict.compare(ranks(), ranks("graphshard")) == ()


# -- lints ----------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu():
    shared = [facts(rank, device="cuda:0", device_id="GPU-1") for rank in range(2)]
    found = only(lints.lint([shared]))
    assert (found.level, found.code) == (Level.FAULT, "GS1121")
    assert "ranks 0, 1 share one GPU (cuda:0 of host)" in found.what
    assert "LOCAL_RANK" in found.fix


def test_gpus_that_only_look_alike():
    """Each rank sees its own GPU as number 0; or each host has one."""
    own = [facts(rank, device="cuda:0", device_id=f"GPU-{rank}") for rank in range(2)]
    hosts = [facts(rank, device_id="0", host=f"host{rank}") for rank in range(2)]
    both_runs = [ranks(), ranks("graphshard")]
    assert [lints.lint(runs) for runs in ([own], [hosts], both_runs)] == [(), (), ()]


def test_forward_called_directly():
    found = only(lints.lint([ranks(direct_forwards=(("(root)", 4), ("head", 2)))]))
    assert (found.level, found.code) == (Level.FAULT, "GS1122")
    assert "forward() of (root), head was called directly (6 times)" in found.what
    assert "model(...), not model.forward(...)" in found.fix


def test_a_parent_before_its_child():
    stacks = (Stack("layers", "Block", 3, 4 * MIB, "(root)"),)
    found = only(lints.lint([ranks(late_children=(("layers.0", "(root)"),), stacks=stacks)]))
    assert (found.level, found.code) == (Level.FAULT, "GS1123")
    assert "(root) was sharded before layers.0" in found.what


def test_blocks_left_in_the_root():
    stacks = (Stack("encoder.layers", "Block", 6, 3 * MIB, "(root)"),)
    found = only(lints.lint([ranks(stacks=stacks)]))
    assert (found.level, found.code) == (Level.WARNING, "GS1124")
    assert "75% of 4,194,304 parameters are in the group of (root)" in found.what
    assert "6 Block in encoder.layers" in found.what
    assert "for block in model.encoder.layers: fully_shard(block)" in found.fix
    few = (Stack("layers", "Block", 6, 2 * MIB, "(root)"),)
    experts = tuple(Stack(f"{n}.experts", "FFN", 8, MIB, f"layers.{n}") for n in range(4))
    assert lints.lint([ranks(stacks=few)]) == lints.lint([ranks(stacks=experts)]) == ()


def test_an_optimizer_of_what_was_replaced():
    found = only(lints.lint([ranks(stale_optimizers=(("AdamW", 14, 15),))]))
    assert (found.level, found.code) == (Level.FAULT, "GS1125")
    assert "AdamW holds 14 of 15 parameters that fully_shard replaced" in found.what


def test_a_group_for_each_linear():
    many = tuple(group(f"layers.{n}.up", kind="Linear", size=n * MIB) for n in range(1, 6))
    found = only(lints.lint([ranks(groups=(*many, group("(root)")))]))
    assert (found.level, found.code) == (Level.WARNING, "GS1127")
    assert "5 of 6 groups are a single Linear (median all-gather 3.0 MiB)" in found.what
    blocks = tuple(group(f"layers.{n}") for n in range(5))
    assert lints.lint([ranks(groups=(*many, *blocks))]) == ()


def test_shards_in_torch_save():
    saved = [facts(0, saves=(("model.pt", 9, 3 * MIB),)), facts(1)]
    found = only(lints.lint([saved]))
    assert (found.level, found.code) == (Level.FAULT, "GS1128")
    assert "9 sharded tensors to model.pt on 1 rank of 2" in found.what
    assert "only 3.0 MiB" in found.what


def test_a_block_that_is_not_captured():
    groups = (group("a"), group("b", in_graph=False, reason="a graph break at x.py:3"))
    found = only(lints.lint([ranks(), ranks("graphshard", groups=groups)]))
    assert (found.level, found.code) == (Level.WARNING, "GS1129")
    assert "b ran through eager FSDP2 (1 of 2 groups): a graph break at x.py:3" in found.what
    assert lints.lint([ranks(groups=groups)]) == ()  # of the eager run
    unused = (group("a"), group("b", in_graph=False, ran=False))
    assert lints.lint([ranks(), ranks("graphshard", groups=unused)]) == ()
    never = (group("a", in_graph=False), group("b", in_graph=False))
    found = only(lints.lint([ranks(), ranks("graphshard", groups=never)]))
    assert "(2 of 2 groups): no compiled call reached them" in found.what
    assert "model.compile(backend='graphshard')" in found.fix


def test_collectives_that_are_mostly_latency():
    small = tuple(group(name, size=MIB // 32) for name in "abc")
    found = only(lints.lint([ranks(groups=small)]))
    assert (found.level, found.code) == (Level.WARNING, "GS1130")
    assert "the median all-gather of 3 groups has 32.0 KiB; below 256.0 KiB" in found.what
    assert "such as 8 blocks in one call" in found.fix
    one_rank = tuple(replace(each, ranks=1) for each in small)
    assert lints.lint([ranks(groups=small[:1])]) == lints.lint([ranks(groups=one_rank)]) == ()


def test_faults_come_first():
    linears = tuple(group(f"layers.{n}.up", kind="Linear", size=MIB) for n in range(6))
    several = ranks(groups=linears, saves=(("x.pt", 1, 1),))
    assert codes(lints.lint([several])) == ["GS1128", "GS1127"]


# -- numbers --------------------------------------------------------------------------------------


def test_a_wrong_gradient_names_its_group():
    found = only(verdict.compare(ranks(), changed(1, b=(1.5,))))
    assert (found.level, found.code) == (Level.FAULT, "GS1111")
    assert "the gradients of b differ by 5.6e-01 of their norm in step 1" in found.what
    assert "those of 1 other groups agree" in found.what


def test_only_the_first_step_that_differs_is_blamed():
    """What goes wrong once makes everything after it differ."""
    later = (step(a=(9.0, 9.0), b=(3.0,)), step(5.0, a=(9.0, 9.0), b=(9.0,)))
    found = only(verdict.compare(ranks(), ranks("graphshard", steps=later)))
    assert "of a differ" in found.what
    assert "in step 0" in found.what


def test_a_missing_gradient_differs():
    assert codes(verdict.compare(ranks(), changed(0, b=(None,)))) == ["GS1111"]


def test_gradients_of_one_norm_that_are_others():
    swapped = tuple(
        replace(s, gradients=tuple(replace(g, projections=tuple(-p for p in g.projections))
                                   for g in s.gradients))
        for s in (step(), step(1.9))
    )  # fmt: skip
    assert codes(verdict.compare(ranks(), ranks("graphshard", steps=swapped))) == ["GS1111"]


def test_rounding_is_no_difference():
    near = changed(0, a=(1.0 + 1e-6, 2.0), b=(3.0 - 1e-6,))
    assert verdict.compare(ranks(), near) == ()
    # A gradient that is zero but for rounding: of a bias in front of a norm, for example.
    eager = tuple(replace(r, steps=(step(a=(1e-9,), b=(3.0,)),)) for r in ranks())
    ours = tuple(replace(r, steps=(step(a=(-1e-9,), b=(3.0,)),)) for r in ranks("graphshard"))
    assert verdict.compare(eager, ours) == ()


def test_the_tolerance_is_the_dtypes():
    wide = changed(0, b=(3.06,))
    assert codes(verdict.compare(ranks(), wide)) == ["GS1111"]
    narrow = tuple(
        replace(r, groups=tuple(replace(g, dtype="bfloat16") for g in r.groups)) for r in ranks()
    )
    assert verdict.compare(narrow, wide) == ()


def test_a_wrong_loss():
    wrong = ranks("graphshard", steps=(step(), step(1.7)))
    found = only(verdict.compare(ranks(), wrong))
    assert (found.level, found.code) == (Level.FAULT, "GS1112")
    assert "the loss of step 1 differs by 1.0e-01 of its size (allowed 0.001)" in found.what


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number(loss):
    """Wrong if eager FSDP2 has a number there, and no difference if it has none either."""
    lost = (step(), step(loss))
    assert codes(verdict.compare(ranks(), ranks("graphshard", steps=lost))) == ["GS1112"]
    assert verdict.compare(ranks(steps=lost), ranks("graphshard", steps=lost)) == ()


def test_a_script_that_does_not_repeat_itself():
    again = ranks(steps=(step(7.0), step(6.0)))
    found = only(verdict.compare(ranks(), ranks("graphshard", steps=(step(5.0),) * 2), again))
    assert (found.level, found.code) == (Level.WARNING, "GS1113")
    assert "first losses of two eager runs are 2.5e+00 apart, the first gradients 0.0" in found.what


def test_a_wrong_forward_of_a_script_that_repeats_itself():
    wrong = ranks("graphshard", steps=(step(5.0), step(4.0)))
    found = only(verdict.compare(ranks(), wrong, ranks()))
    assert (found.level, found.code) == (Level.FAULT, "GS1112")
