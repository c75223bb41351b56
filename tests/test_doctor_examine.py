"""Which runs an examination makes, and whose difference it is that they show."""

import math
from dataclasses import replace

import pytest
import torch
from doctor_facts import as_aot, changed, codes, examined, ranks, run, step

from graphshard.doctor import blame, describe
from graphshard.doctor.findings import Level
from graphshard.doctor.origin import Cause, Doubt
from graphshard.doctor.text import examination_dict, examination_text


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
