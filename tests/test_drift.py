"""When a tuned graph measures its steps again: seldom, and only if they stay away."""

from hypothesis import given
from hypothesis import strategies as st

from graphshard.compiler.tuning import PATIENCE, SHARE, Drift

WINDOW = 4


def measured_at(medians: list[float]) -> list[int]:
    """After which windows steps are measured again, by which a plan settles anew."""
    drift, found = Drift(WINDOW), []
    for index, median_us in enumerate(medians):
        if drift.is_over(median_us):
            found.append(index)
            drift.begin()
    return found


def test_a_median_is_of_one_window() -> None:
    drift, now_s, found = Drift(WINDOW), 0.0, []
    for step in range(2 * WINDOW + 1):
        found.append(drift.median_us(now_s))
        now_s += 0.1 if step != 2 else 5.0  # one slow step moves no median
    medians = [round(us) for us in found if us is not None]
    assert medians == [100_000, 100_000]
    assert found.index(next(us for us in found if us is not None)) == WINDOW


def test_a_change_that_stays_is_seen_after_the_first_patience() -> None:
    assert measured_at([100.0] * 3 + [400.0] * 10) == [3 + PATIENCE[0] - 1]
    assert measured_at([400.0] * 3 + [100.0] * 10) == [3 + PATIENCE[0] - 1]


def test_what_comes_and_goes_changes_nothing() -> None:
    assert measured_at([100.0, 400.0] * 50) == []


@given(st.lists(st.floats(1 - SHARE + 0.01, 1 + SHARE - 0.01), min_size=1, max_size=200))
def test_noise_within_the_share_changes_nothing(medians: list[float]) -> None:
    assert measured_at([1.0, *medians]) == []


@given(st.lists(st.floats(1.0, 1000.0), max_size=200))
def test_any_machine_is_measured_more_and_more_seldom(medians: list[float]) -> None:
    found = measured_at(medians)
    gaps = [b - a for a, b in zip([-1, *found], found, strict=False)]
    assert all(gap > PATIENCE[min(k, len(PATIENCE) - 1)] for k, gap in enumerate(gaps))
