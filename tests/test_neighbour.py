"""What two ranks have issued is compared afterwards, wherever each of them stands."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import two_layers
from torch.distributed import HashStore

from graphshard.errors import DivergedRanks
from graphshard.runtime import neighbour
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.issued import Trail
from graphshard.runtime.job_store import job_store
from graphshard.runtime.leftovers import OwnStore
from graphshard.runtime.neighbour import Passed, parting

WORDS = st.lists(st.sampled_from("abc"), max_size=30)


def passed(words, kept):
    """After these collectives, if the last `kept` of them are remembered."""
    digest, last = 0, []
    for word in words:
        last.append((digest, word))
        digest = hash((digest, ord(word)))
    return Passed(len(words), digest, tuple(last[-kept:]))


@given(WORDS, WORDS, WORDS, st.integers(1, 40), st.integers(1, 40))
def test_the_first_difference_is_found(common, own, other, kept, shown):
    mine, yours = common + own, common + other
    differ = [at for at, (a, b) in enumerate(zip(mine, yours, strict=False)) if a != b]
    found = parting(passed(mine, kept), passed(yours, shown))
    if not differ:
        assert found is None  # one of them is only further on
    elif abs(len(mine) - len(yours)) <= min(kept, shown) - 1:
        told_from = max(len(mine) - kept, len(yours) - shown)
        assert found == max(differ[0], min(max(told_from, 0), min(len(mine), len(yours))))
    else:
        assert found is None or found >= differ[0]


def trails(monkeypatch):
    monkeypatch.setattr(neighbour, "EVERY_S", 0.0)
    monkeypatch.setattr(neighbour, "PER_RANK_S", 0.0)
    store = job_store(HashStore(), 5.0)
    made = []
    for rank in (0, 1):
        ballot = Ballot(OwnStore("test", store, 2), rank, (0, 1), ("a", "b"), 5.0)
        ballot.running = replace(two_layers(), name="model")
        made.append(Trail(ballot, asks=False))
    return made


def run(trail, *names):
    for name in names:
        trail.note(name, lambda name=name: f"all-gather of {name}")
    trail.end(is_backward=False)
    time.sleep(0.05)  # what was begun in the background is done


def test_ranks_that_ask_nobody_hear_it_from_their_neighbour(monkeypatch):
    first, second = trails(monkeypatch)
    for _ in range(3):
        run(first, "a", "b")
        run(second, "a", "b")
    run(first, "a", "b")
    run(second, "b", "a")
    with pytest.raises(DivergedRanks) as found:
        run(second, "b", "a")
    assert str(found.value).startswith(
        "GS702: the ranks issue different collectives: collective 9 is rank 1: all-gather of b; "
        "rank 0: all-gather of a; "
    )


def test_a_rank_that_is_only_behind_is_no_difference(monkeypatch):
    first, second = trails(monkeypatch)
    for _ in range(5):
        run(first, "a", "b")
    for _ in range(5):
        run(second, "a", "b")
    run(first, "a")
