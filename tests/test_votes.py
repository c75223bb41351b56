"""Ranks that vote, as threads of one process with a store in memory."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from plans import group, plan, two_layers
from torch.distributed import HashStore

from graphshard.errors import DivergedRanks
from graphshard.runtime import agree
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.job_store import job_store
from graphshard.runtime.leftovers import OwnStore
from graphshard.schedule.plan import Estimate, Figures

PLAN = two_layers()
FQNS = ("layers.0", "layers.1")
OTHER = plan(PLAN.groups, "issue 1, wait 1, compute 7, release 1", name="other")
SHORT = plan(PLAN.groups, "issue 0, wait 0, compute 7, release 0", name="short")


def ballots(count, limit_s=5.0):
    store = job_store(HashStore(), limit_s)
    return [
        Ballot(OwnStore("test", store, count), rank, tuple(range(count)), FQNS, limit_s)
        for rank in range(count)
    ]


def together(*calls):
    """Result or DivergedRanks of each call, all of them at once."""

    def outcome(call):
        try:
            return call()
        except DivergedRanks as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def vote(ranks, plans):
    return together(*(lambda b=b, p=p: agree.agree_on_plan([b], p) for b, p in zip(ranks, plans)))  # noqa: B905


def planned(made, step_time_us):
    figures = Figures(step_time_us, 0.0, 1)
    return replace(made, estimate=Estimate(figures, figures, 2, 1.0))


def test_equal_signatures_run_what_each_rank_planned():
    ranks = ballots(4)
    own = [replace(PLAN, name=f"graph {rank}") for rank in range(4)]
    assert vote(ranks, own) == own
    assert [ballot.slot for ballot in ranks] == [1] * 4


def test_what_was_agreed_on_is_not_asked_again():
    ranks = ballots(2)
    vote(ranks, [PLAN, PLAN])
    again = replace(PLAN, name="graph 0/1")
    assert agree.agree_on_plan([ranks[0]], again) == again
    assert ranks[0].slot == 1


def test_every_rank_raises_the_same():
    errors = vote(ballots(3), [PLAN, OTHER, PLAN])
    assert len({str(error) for error in errors}) == 1
    assert errors[0].code == "GS702"
    assert "collective 0 is ranks 0, 2: forward all_gather of layers.0" in str(errors[0])
    assert "rank 1: forward all_gather of layers.1" in str(errors[0])
    assert "toy on rank 0, other on rank 1" in str(errors[0])


def test_a_graph_that_ends_early_is_fsdp2s():
    first, second = ballots(2)
    errors = together(
        lambda: agree.agree_on_plan([first], PLAN),
        lambda: agree.agree_on_plan([second], SHORT, ends_early=True),
    )
    assert [error.code for error in errors] == ["GS701", "GS701"]


def test_a_graph_that_is_all_of_a_shorter_call_is_an_error():
    """FSDP2 would wait for the rank that leaves a group out."""
    assert [error.code for error in vote(ballots(2), [PLAN, SHORT])] == ["GS702", "GS702"]


def test_the_lowest_ranks_plan_is_everybodys():
    early = plan(
        PLAN.groups,
        "issue 1, issue 0, wait 0, compute 4, release 0, wait 1, compute 3, release 1 kept",
        "issue 0, issue 1 kept, wait 1 kept, compute 5, release 1, reduce 1, wait 0, compute 6,"
        "release 0, reduce 0, reduced 1, reduced 0",
    )
    own = [planned(PLAN, 1.0), replace(planned(early, 2.0), name="mine")]
    ranks = ballots(2)
    assert own[0].fingerprint != own[1].fingerprint
    assert vote(ranks, own) == [own[0], replace(own[0], name="mine")]
    # A recompile on one rank only keeps to it.
    assert agree.agree_on_plan([ranks[1]], own[1]) == replace(own[0], name="mine")


def test_a_plan_that_does_not_fit_is_not_taken():
    longer = replace(OTHER, groups=(*PLAN.groups, group(2, "layers.2")))
    errors = vote(ballots(2), [planned(PLAN, 1.0), planned(longer, 1.0)])
    assert [error.code for error in errors] == ["GS702", "GS702"]


def test_a_rank_that_cannot_compile():
    first, second = ballots(2)
    found = together(
        lambda: agree.agree_on_plan([first], PLAN),
        lambda: agree.refuse([second], "graph 0/0", "GS601: no schedule fits", waits=True),
    )
    assert found[1] is False
    assert str(found[0]) == "GS703: rank 1 could not compile graph 0/0: GS601: no schedule fits"
    assert (first.slot, second.slot) == (1, 1)


def test_ranks_that_cannot_compile_alike():
    calls = [lambda b=b: agree.refuse([b], "graph", "boom", waits=True) for b in ballots(3)]
    assert together(*calls) == [True] * 3


def test_a_rank_that_runs_something_answers():
    first, second = ballots(2)
    vote((first, second), [PLAN, PLAN])
    first.running = PLAN
    agree.answer([first])  # nobody asks

    def late():
        while True:
            agree.answer([first])

    found = together(late, lambda: agree.agree_on_plan([second], SHORT))
    assert str(found[0]) == str(found[1])
    assert found[0].code == "GS702"  # too late for FSDP2


def test_a_rank_that_does_not_come():
    ranks = ballots(3, limit_s=0.2)
    found = vote(ranks[:2], [PLAN, PLAN])
    assert [error.code for error in found] == ["GS704", "GS704"]
    text = "rank 2 did not come to a new graph of layers.0, layers.1 in 0 s"
    assert text in str(found[0])
    with pytest.raises(DivergedRanks, match=f"GS703: .*{text}"):  # it comes after all
        agree.agree_on_plan([ranks[2]], PLAN)
    assert [ballot.slot for ballot in ranks] == [1] * 3


def test_other_meshes_are_no_concern():
    """Ranks of one mesh may differ in what they do on another."""
    ranks = ballots(2)
    for ballot in ranks:
        ballot.groups = ("layers.0",)
    only = plan(PLAN.groups, "issue 0, issue 1, wait 0, wait 1, compute 1, release 0, release 1")
    without = plan(PLAN.groups, "issue 0, wait 0, compute 1, release 0")
    assert vote(ranks, [only, without]) == [only, without]


def check(ballot, made, *fqns):
    return lambda: agree.check_call([ballot], made, fqns)


def test_every_call_is_compared():
    first, second = ballots(2)
    for _ in range(4):
        assert together(check(first, PLAN, "a"), check(second, PLAN, "a")) == [None, None]
    assert first.store._store.line.store.num_keys() <= 4  # old calls are deleted
    found = together(check(first, PLAN, "a"), check(second, PLAN, "b"))
    assert str(found[0]) == str(found[1]) == "GS705: at call 4, rank 0 runs a; rank 1 runs b"


def test_a_call_on_one_rank_only(monkeypatch):
    monkeypatch.setattr(agree, "STEP_LIMIT_S", 0.1)
    with pytest.raises(DivergedRanks, match="GS704: rank 1 did not come to call 0 of a in 0 s"):
        check(ballots(2)[0], PLAN, "a")()


def test_reductions_move_only_with_one_plan_for_all():
    fast, slow = (planned(PLAN, step_us) for step_us in (10.0, 20.0))
    apart = replace(fast, reduces_apart=True)
    assert [p.reduces_apart for p in vote(ballots(2), [apart, slow])] == [True, True]
    assert [p.reduces_apart for p in vote(ballots(2), [slow, apart])] == [False, False]


def test_reductions_do_not_move_without_a_question():
    ranks = ballots(2)
    vote(ranks, [PLAN, PLAN])
    assert not agree.agree_on_plan([ranks[0]], replace(PLAN, reduces_apart=True)).reduces_apart
