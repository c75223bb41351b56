"""Short ways to choices: do they fit, many moves at once, what schedules say of them."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from planning import random_problem, with_absent, with_nodes, with_offloads

from graphshard.planner.choices import Choices, choices_of
from graphshard.planner.compare import schedules
from graphshard.planner.memo import Memo
from graphshard.planner.moves import What, lean_choices, moves, taken
from graphshard.planner.plan_step import fsdp2
from graphshard.planner.score import SearchContext, candidate, fits
from graphshard.planner.search import tune

TRIES = 12


def drawn(seed):
    r = random.Random(seed)
    problem = random_problem(seed, 8, fewest=3)
    problem = with_absent(problem, seed) if r.random() < 0.5 else problem
    problem = with_offloads(problem, seed) if r.random() < 0.5 else problem
    problem = with_nodes(problem) if r.random() < 0.5 else problem
    return replace(problem, micro_steps=r.choice((1, 1, 2, 4))), r


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10**6), share=st.floats(0.5, 1.2), tuned=st.booleans())
def test_what_does_not_fit_cannot_be_placed(seed, share, tuned):
    """And what fits can, but for 1 in 300: see `fits`."""
    problem, r = drawn(seed)
    memo = Memo(problem)
    context = SearchContext(memo, int(share * fsdp2(problem).peak_bytes))
    bases = [Choices(), lean_choices(memo)]
    if tuned:  # with the few policies of a search
        tune(context, bases[1])
    everything = moves(memo)
    too_hopeful = 0
    for _ in range(TRIES):
        some = r.sample(everything, r.randint(0, len(everything)))
        choices = taken(r.choice(bases), some)
        is_placed = candidate(context, choices) is not None
        assert fits(context, choices) or not is_placed
        too_hopeful += fits(context, choices) and not is_placed
    assert too_hopeful <= 1


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_moves_taken_together_are_moves_taken_one_by_one(seed):
    problem, r = drawn(seed)
    everything = moves(Memo(problem))
    some = r.choices(everything, k=r.randint(0, 2 * len(everything))) if everything else []
    one_by_one = Choices()
    for move in some:
        one_by_one = taken(one_by_one, [move])
    assert taken(Choices(), some) == one_by_one


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_schedules_say_what_was_chosen(seed):
    """All but delays, and what is computed again or offloaded: with these the same is placed."""
    problem, r = drawn(seed)
    memo = Memo(problem)
    context = SearchContext(memo, 2 * fsdp2(problem).peak_bytes)
    everything = [move for move in moves(memo) if move.what is not What.DELAY]
    for _ in range(TRIES):
        chosen = taken(Choices(), r.sample(everything, r.randint(0, len(everything))))
        found = candidate(context, chosen)
        if found is None:
            continue
        said = choices_of(schedules(memo, found), chosen.across)
        again = candidate(
            context, replace(said, recompute=chosen.recompute, offload=chosen.offload)
        )
        assert again is not None
        assert again.rank == found.rank
