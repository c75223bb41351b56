"""Random models, shardings and sequences of calls: graphshard against eager FSDP2, bit by bit.

CI runs 20 cases, the same ones each time. `GRAPHSHARD_FUZZ=500 GRAPHSHARD_FUZZ_SEED=1` runs 500
others. A case that eager FSDP2 refuses is discarded and counted, since there is nothing to compare
with. A failing case is shrunk; its repr goes into `test_fuzz_found.py`.
"""

import os
from collections import Counter

import pytest
from drawing import drawing
from fuzz_cases import FuzzCase, has
from fuzz_draw import from_the_host, fuzz_cases, on_several_meshes
from fuzz_run import DIFFERS, REFUSED, Outcome, run_case, run_oracle
from hypothesis import assume, given
from hypothesis import strategies as st
from pool import Pool, WorkerError, capped

from graphshard.fsdp2.versions import TORCH

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_FUZZ", "20"))
SEED = os.environ.get("GRAPHSHARD_FUZZ_SEED")
LIMIT_S = 120.0  # of one case; the usual one takes two seconds
LEAST_IN_GRAPH = 0.8  # of the forward calls of groups, where the model has no graph break
MOST_REFUSED = 0.3  # of the cases


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """verdict -> cases; "in graph" and "calls" -> forward calls of groups, those of models with a
    graph break apart; other reasons."""
    return Counter()


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * LIMIT_S))
@pytest.mark.skipif(capped(2) < 2, reason="needs 2 ranks")
def test_equals_eager(pool: Pool, tally: Counter[str]) -> None:
    compare_drawn(pool, tally, CASES, fuzz_cases(most_ranks=capped(4)))


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * LIMIT_S))
@pytest.mark.skipif(capped(2) < 2, reason="needs 2 ranks")
def test_equals_eager_over_replicas(pool: Pool) -> None:
    """All-reduces are under way until backward ends, whatever else comes."""
    cases = fuzz_cases(most_ranks=capped(4), replicated=True)
    compare_drawn(pool, Counter(), CASES // 2, cases)


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * LIMIT_S))
@pytest.mark.skipif(capped(2) < 2, reason="needs 2 ranks")
@pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13")
def test_equals_eager_on_several_meshes(pool: Pool) -> None:
    cases = on_several_meshes(fuzz_cases(most_ranks=capped(4)))
    compare_drawn(pool, Counter(), CASES // 2, cases)


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * LIMIT_S))
def test_equals_eager_from_the_host_of_one_rank(pool: Pool) -> None:
    """No collective: the copies themselves are what is waited for."""
    compare_drawn(pool, Counter(), CASES // 4, fuzz_cases(most_ranks=1).map(from_the_host))


def compare_drawn(
    pool: Pool, tally: Counter[str], count: int, cases: st.SearchStrategy[FuzzCase]
) -> None:
    @drawing(count, SEED)
    @given(cases)
    def compare(case: FuzzCase) -> None:
        outcome = outcome_of(pool, case)
        tally.update([outcome.verdict, f"on {case.ranks} ranks"])
        where = " around a break" if has(case.tree, "break") else ""
        tally.update({f"in graph{where}": outcome.in_graph, f"calls{where}": outcome.calls})
        tally.update(f"outside: {reason}" for reason in outcome.reasons)
        assert outcome.verdict != DIFFERS, outcome.why
        assume(outcome.verdict != REFUSED)

    compare()
    for what, number in sorted(tally.items()):
        print(f"{number:6} {what}")
    share = tally["in graph"] / tally["calls"]
    assert share >= LEAST_IN_GRAPH, f"{share:.0%} of the groups' calls ran in a graph"
    refused = tally[REFUSED] / (tally[REFUSED] + count)
    assert refused <= MOST_REFUSED, f"eager FSDP2 refused {refused:.0%} of the cases"


def outcome_of(pool: Pool, case: FuzzCase) -> Outcome:
    """What the ranks say. After a difference the workers are not used again."""
    try:
        outcomes = pool.run(case.ranks, run_case, case, timeout_s=LIMIT_S)
    except WorkerError:
        if ends_eager(pool, case):
            return Outcome(REFUSED, "eager FSDP2 hangs, or ends its process")
        raise
    for outcome in outcomes:
        if outcome.verdict == DIFFERS:
            pool.close()
    return max(outcomes, key=lambda outcome: len(outcome.why))


def ends_eager(pool: Pool, case: FuzzCase) -> bool:
    """Eager FSDP2 alone does not come to the end of it either."""
    try:
        pool.run(case.ranks, run_oracle, case, timeout_s=LIMIT_S)
    except WorkerError:
        return True
    return False
