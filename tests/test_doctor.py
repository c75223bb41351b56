"""The doctor's judgement, on recorded facts: lints, comparison, environment, what it prints."""

import json
import math
import re
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphshard.cli import main
from graphshard.doctor import attach, blame, describe, environment, lints, verdict
from graphshard.doctor.environment import Probe
from graphshard.doctor.examine import Examination, judge
from graphshard.doctor.facts import Facts, GradientFacts, GroupFacts, Stack, StepFacts
from graphshard.doctor.findings import Level, fault, warning, worst
from graphshard.doctor.launch import LaunchedRun, run_watched
from graphshard.doctor.origin import Cause, Doubt
from graphshard.doctor.text import WIDTH, environment_text, examination_dict, examination_text
from graphshard.errors import DoctorError

ROOT = Path(__file__).parents[1]
MIB = 2**20


def group(name, *, kind="Block", size=4 * MIB, in_graph=True, **changes):
    made = GroupFacts(name, kind, size // 4, size, 2, "float32", ran=True, in_graph=in_graph)
    return replace(made, **changes)


def gradient(name, *norms):
    digests = tuple(norm if norm is None else hash(norm) for norm in norms)
    return GradientFacts(name, norms, tuple(norm and 0.5 * norm for norm in norms), digests)


def step(loss=2.0, **norms):
    gradients = norms or {"a": (1.0, 2.0), "b": (3.0,)}
    found = tuple(gradient(name, *values) for name, values in gradients.items())
    return StepFacts((loss,), found, 5, 3, 0, 1000.0)


def facts(rank=0, mode="eager", **changes):
    steps = changes.pop("steps", (step(), step(1.9)))
    made = Facts(
        mode, rank, 2, "host", "cpu", "", 4 * MIB, (group("a"), group("b")), (), steps, MIB // 4
    )
    return replace(made, **changes)


def ranks(mode="eager", **changes):
    return tuple(facts(rank, mode, **changes) for rank in range(2))


def codes(findings):
    return [finding.code for finding in findings]


def only(findings):
    (found,) = findings
    return found


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


def changed(place, **norms):
    """Both ranks, where the gradients of one step are others."""
    steps = [step(), step(1.9)]
    given = {"a": (1.0, 2.0), "b": (3.0,), **norms}
    steps[place] = step(steps[place].losses[0], **given)
    return ranks("graphshard", steps=tuple(steps))


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


# -- the examination ------------------------------------------------------------------------------


def run(found, status=0, steps_wanted=2, tail=()):
    return LaunchedRun(
        found[0].mode if found else "eager", tuple(found), status, steps_wanted, tail
    )


def examined(*runs, **settings):
    """The examination, and the modes in which the command was run."""
    left, modes = list(runs), []

    def launch(mode):
        modes.append(mode)
        return left.pop(0)

    return judge(("train.py",), launch, **settings), modes


def test_a_healthy_script_runs_twice():
    found, modes = examined(run(ranks()), run(ranks("graphshard")))
    assert (found.findings, found.level, modes) == ((), Level.OK, ["eager", "graphshard"])
    assert (found.verdict.ranks, found.verdict.in_graph) == (2, 2)


UNSEEDED = (step(5.0), step(2.0, a=(2.0, 1.0), b=(3.0,)))  # other losses, or other gradients only


@pytest.mark.parametrize("ours", UNSEEDED)
@pytest.mark.parametrize("again", UNSEEDED)
def test_a_third_run_only_where_the_first_steps_differ(ours, again):
    """Also by gradients alone: a loss can be that of another seed by chance."""
    other, third = run(ranks("graphshard", steps=(ours,) * 2)), run(ranks(steps=(again,) * 2))
    found, modes = examined(run(ranks()), other, third)
    assert (codes(found.findings), modes) == (["GS1113"], ["eager", "graphshard", "eager"])


def test_a_script_that_fails_without_graphshard():
    broken = ranks(steps=(), failure="TypeError: no", late_children=(("a", "(root)"),))
    found, modes = examined(run(broken, status=1))
    assert (codes(found.findings), modes) == (["GS1110", "GS1123"], ["eager"])
    assert "TypeError: no" in found.findings[0].what


def test_a_script_that_fails_only_with_graphshard():
    broken = ranks("graphshard", steps=(), failure="RuntimeError: no")
    found, _ = examined(run(ranks()), run(broken, status=1, tail=("line",)))
    assert (codes(found.findings), found.tail) == (["GS1114"], ("line",))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (run((), status=0), "no process of it called fully_shard or backward"),
        (run((), status=3, tail=("bad flag",)), "it ended with status 3: bad flag"),
        (run(ranks(), status=None), "past the time limit"),
        (run(ranks()[:1]), "only 1 of 2 ranks reported"),
        (run(ranks(steps=())), "made no optimizer step"),
    ],
)
def test_runs_of_which_nothing_can_be_said(broken, why):
    found, _ = examined(broken)
    assert codes(found.findings) == ["GS1110"]
    assert why in found.findings[0].what


def test_a_run_that_was_ended_may_have_any_status():
    """A script may well mind that it is ended after the wanted steps."""
    assert run(ranks(), status=1).is_whole
    assert not run(ranks(), status=1, steps_wanted=0).is_whole


def test_other_numbers_of_steps():
    found, _ = examined(run(ranks()), run(ranks("graphshard", steps=(step(),)), steps_wanted=0))
    assert codes(found.findings) == ["GS1115"]


# -- whose difference it is -----------------------------------------------------------------------


def exact(found):
    """As a run with compute="aten" in which all was captured."""
    return tuple(replace(rank, is_exact=True) for rank in found)


def as_aot(found, graphs=1):
    return tuple(replace(rank, mode="aot_eager", aot_graphs=graphs) for rank in found)


def origin(eager, ours, aot):
    departure = blame.departure_of(eager, ours)
    return departure and blame.origin_of(departure, eager, ours, aot)


LAST_BIT = 3.0 + 1e-7


def test_a_bit_counts_where_ops_run_as_they_are():
    near = changed(1, b=(LAST_BIT,))
    assert blame.departure_of(ranks(), near) is None
    assert blame.departure_of(ranks(), exact(ranks("graphshard"))) is None
    found = blame.departure_of(ranks(), exact(near))
    assert (found.step, found.in_loss, found.params) == (1, False, (("b", 0),))
    loss = ranks("graphshard", steps=(step(2.0 + 1e-7), step(1.9)))
    assert blame.departure_of(ranks(), exact(loss)).in_loss
    nothing = ranks(steps=(step(math.nan), step(1.9)))
    assert blame.departure_of(nothing, exact(nothing)) is None


@pytest.mark.parametrize("norm", [LAST_BIT, 2.0])
def test_aot_eager_with_the_same_bits(norm):
    ours = exact(changed(1, b=(norm,)))
    # It may differ in more than graphshard does.
    found = origin(ranks(), ours, as_aot(changed(1, a=(1.1, 2.0), b=(norm,))))
    assert (found.cause, found.is_same, found.doubt) == (Cause.AOTAUTOGRAD, True, None)
    assert (found.step, found.groups) == (1, ("b",))


@pytest.mark.parametrize(
    ("ours", "aot", "cause"),
    [
        ({"b": (LAST_BIT,)}, {"b": (3.0 - 3e-7,)}, Cause.AOTAUTOGRAD),
        ({"b": (2.0,)}, {"b": (2.5,)}, Cause.AOTAUTOGRAD),
        ({"b": (LAST_BIT,)}, {}, Cause.OTHER),
        ({"b": (2.0,)}, {"b": (LAST_BIT,)}, Cause.OTHER),
        # Of another size, of another parameter, just within the tolerance.
        ({"b": (3.0 + 1e-4,)}, {"b": (LAST_BIT,)}, Cause.UNDECIDED),
        ({"a": (1.1, 2.0)}, {"a": (1.0, 2.1)}, Cause.UNDECIDED),
        ({"b": (2.99,)}, {"b": (2.998,)}, Cause.UNDECIDED),
    ],
)
def test_aot_eager_with_other_bits(ours, aot, cause):
    found = origin(ranks(), exact(changed(1, **ours)), as_aot(changed(1, **aot)))
    assert (found.cause, found.is_same) == (cause, False)
    assert found.doubt is (Doubt.ELSEWHERE if cause is Cause.UNDECIDED else None)


def test_aot_eager_that_differs_in_another_step():
    """What comes later explains nothing, and what came before may explain all."""
    for place, cause in ((0, Cause.OTHER), (1, Cause.UNDECIDED)):
        aot = as_aot(changed(1 - place, b=(2.9,)))
        assert origin(ranks(), exact(changed(place, b=(LAST_BIT,))), aot).cause is cause


def test_a_wrong_reduction_is_not_excused_by_rounding():
    """The last bit is AOTAutograd's, what follows is not."""
    rounded = step(a=(1.0, 2.0), b=(LAST_BIT,))
    ours = exact(ranks("graphshard", steps=(rounded, step(1.9, a=(1.0, 2.0), b=(1.0,)))))
    found = origin(ranks(), ours, as_aot(ranks(steps=(rounded, step(1.9)))))
    assert (found.cause, found.step) == (Cause.OTHER, 1)


def test_losses_that_differ():
    ours = exact(ranks("graphshard", steps=(step(2.5), step(1.9))))
    for loss, cause in ((2.5, Cause.AOTAUTOGRAD), (2.6, Cause.AOTAUTOGRAD), (2.0, Cause.OTHER)):
        found = origin(ranks(), ours, as_aot(ranks(steps=(step(loss), step(1.9)))))
        assert (found.cause, found.in_loss, found.groups) == (cause, True, ())


def test_one_further_run_where_something_differs():
    ours, three = run(changed(1, b=(2.0,))), ["eager", "graphshard", "aot_eager"]
    found, modes = examined(run(ranks()), ours, run(as_aot(changed(1, b=(2.0,)))))
    assert (modes, found.origin.cause) == (three, Cause.AOTAUTOGRAD)
    assert codes(found.findings) == ["GS1111"]
    assert "aot_eager" in found.findings[0].fix
    assert examination_dict(found)["origin"]["cause"] == "aotautograd"
    assert "AOTAutograd's, not sharding's: aot_eager has the same bits" in examination_text(found)
    found, modes = examined(run(ranks()), ours, run(as_aot(ranks())))
    assert (modes, found.origin.cause) == (three, Cause.OTHER)
    assert "aot_eager" not in found.findings[0].fix
    found, modes = examined(run(ranks()), ours, finds_origin=False)
    assert (modes, found.origin, codes(found.findings)) == (three[:2], None, ["GS1111"])


def test_gradients_that_differ_in_the_first_step_of_a_script_that_repeats_itself():
    """One run to tell that it does, one to tell whose the difference is."""
    ours, aot = run(changed(0, b=(2.0,))), run(as_aot(ranks()))
    found, modes = examined(run(ranks()), ours, run(ranks()), aot)
    assert modes == ["eager", "graphshard", "eager", "aot_eager"]
    assert (found.origin.cause, codes(found.findings)) == (Cause.OTHER, ["GS1111"])


@pytest.mark.parametrize(
    ("aot", "doubt"),
    [
        (run(ranks("aot_eager", steps=(), failure="no"), status=1), Doubt.FAILED),
        (run((), status=None), Doubt.FAILED),
        (run(as_aot(ranks(steps=(step(),))), steps_wanted=0), Doubt.FAILED),
        (run(as_aot(ranks()[:1])), Doubt.FAILED),
        (run(as_aot(ranks(), graphs=0)), Doubt.NOT_COMPILED),
    ],
)
def test_a_run_with_aot_eager_that_says_nothing(aot, doubt):
    found, _ = examined(run(ranks()), run(changed(1, b=(2.0,))), replace(aot, tail=("line",)))
    assert (found.origin.cause, found.origin.doubt) == (Cause.UNDECIDED, doubt)
    assert found.tail == (("line",) if doubt is Doubt.FAILED else ())
    assert codes(found.findings) == ["GS1111"]
    assert "undecided: " in examination_text(found)


def test_a_digest_has_every_bit():
    there = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    other, swapped = there.clone(), there.clone()
    other[4321] = torch.nextafter(other[4321], torch.tensor(9.0))
    swapped[[0, 1]] = there[[1, 0]]
    known = digest(there)
    assert all(digest(one) != known for one in (other, swapped, there[:-1]))
    assert digest(there.clone()) == digest(there.double()) == known
    nothing = torch.tensor([0.0, math.nan])
    assert digest(nothing) == digest(-nothing)
    assert digest(torch.empty(0)) == 0
    assert describe._numbers(None) == (None, None, None)


def digest(gradient):
    return describe._numbers(gradient)[2]


# -- the environment ------------------------------------------------------------------------------


def test_the_supported_torch_is_what_the_package_declares():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"][0]
    assert declared == f"torch>={'.'.join(map(str, environment.OLDEST_TORCH))}"


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.13.0+cu130", None),
        ("2.11.0", None),
        ("2.15.2", None),
        ("2.10.1", Level.FAULT),
        ("2.16.0a0", Level.WARNING),
    ],
)
def test_versions_of_torch(version, level):
    finding = environment.probe_torch(version).finding
    assert (finding and finding.level) == level
    assert finding is None or finding.code == "GS1101"


def raises(error):
    def find():
        raise error

    return find


@pytest.mark.parametrize(
    ("probe", "code", "level"),
    [
        (environment.probe_backend(["inductor"]), "GS1102", Level.FAULT),
        (environment.probe_collectives(True, False, num_gpus=8), "GS1103", Level.FAULT),
        (environment.probe_collectives(False, False, num_gpus=0), "GS1103", Level.FAULT),
        (environment.probe_compiler(raises(OSError("no g++")), has_gpu=False), "GS1104", "fault"),
        (environment.probe_compiler(raises(OSError("no g++")), has_gpu=True), "GS1104", "warning"),
        (environment.probe_cache(raises(PermissionError(13, "denied"))), "GS1105", Level.FAULT),
    ],
)
def test_what_is_missing(probe, code, level):
    assert (probe.finding.code, probe.level) == (code, level)


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    probe = environment.probe_cache(lambda: tmp_path / "cache")
    assert probe.finding.code == "GS1105"
    assert str(tmp_path) in probe.finding.what


def test_enough():
    assert environment.probe_collectives(True, False, num_gpus=0).level is Level.OK
    assert environment.probe_backend(["graphshard"]).level is Level.OK
    assert environment.devices_text(["H200", "H200"], 8) == "2 x H200, CPU with 8 cores"


# -- what is printed ------------------------------------------------------------------------------


def test_this_environment(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[-1] for line in out.splitlines()[2:8]] == ["ok"] * 6
    assert out.endswith("nothing found\n")
    assert err == ""


def test_a_faulty_environment(capsys, monkeypatch):
    probes = (Probe("cache", "/x", fault("GS1105", "cannot write", "chmod")),)
    monkeypatch.setattr(environment, "probe_environment", lambda: probes)
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["level"], told["probes"][0]["finding"]["code"]) == ("fault", "GS1105")


def test_the_screens_fit():
    others = (changed(0, b=(1.0,)), ranks(), as_aot(ranks()))
    found, _ = examined(*map(run, (ranks(), *others)))
    long = replace(found, command=("torchrun", *(["--long-option"] * 20)))
    for text in (examination_text(long), environment_text((Probe("x", "y" * 200),))):
        assert max(map(len, text.splitlines())) <= WIDTH
        assert text.isascii()
    table = examination_text(found)
    assert "2 ranks, 2 steps, 2 of 2 groups in a graph" in table
    assert re.search(r"step time, median +1\.00 ms +1\.00 ms", table)
    assert re.search(r"all-gathers per step +5 +5\n", table)
    assert re.search(r"largest difference of a gradient +\S+ +at most 0\.001  at b", table)
    assert "fault    GS1111  the gradients of b" in table
    assert "differs first             gradients of b, in step 0\n" in table
    assert "not AOTAutograd's: aot_eager does not differ from eager FSDP2" in table


def test_levels():
    assert worst(()) is Level.OK
    assert worst((warning("a", "b", "c"),)) is Level.WARNING
    assert worst((warning("a", "b", "c"), fault("a", "b", "c"))) is Level.FAULT
    assert Examination((), None, ()).level is Level.OK


def test_a_sitecustomize_of_the_user_still_runs(tmp_path, monkeypatch):
    """The doctor's own one, which is first on the path, is passed over."""
    for folder in ("hook", "user"):
        (tmp_path / folder).mkdir()
        text = f"import sys; sys.modules['doctor_ran_{folder}'] = sys"
        (tmp_path / folder / "sitecustomize.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        monkeypatch.delitem(sys.modules, f"doctor_ran_{folder}", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hook"), *sys.path])
    monkeypatch.setenv(attach.FOLDER, str(tmp_path))
    attach.attach()
    assert ("doctor_ran_user" in sys.modules, "doctor_ran_hook" in sys.modules) == (True, False)
    del sys.modules["doctor_ran_user"]


@pytest.mark.parametrize("steps", ["-1", "x", "1.5"])
def test_steps_that_are_none(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--steps", steps, "--", "true"])
    assert "is not a number of steps" in capsys.readouterr().err


# -- the launch -----------------------------------------------------------------------------------


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(DoctorError, match="GS1141: cannot start no-such-program"):
        run_watched(["no-such-program"], "eager", 1, 1.0)
    assert main(["doctor", "--", "no-such-program"]) == 2
    assert "GS1141" in capsys.readouterr().err


def test_what_hangs_is_stopped_with_its_children(tmp_path):
    """The child is in a session of its own, as torchrun's ranks are, and ignores signals."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-S', '-c', {child!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    # -S: without sitecustomize, and so without torch.
    stopped = run_watched([sys.executable, "-S", "-c", parent], "eager", 1, 5.0)
    assert (stopped.status, stopped.is_whole) == (None, False)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or _is_zombie(pid):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child is still there")


def _is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
