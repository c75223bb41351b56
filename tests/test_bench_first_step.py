"""bench/first_step.py: its arithmetic with made-up numbers."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import first_step  # noqa: E402
from bench.first_step import OTHER, OURS, PLAIN, Launch, Pair  # noqa: E402


def pair(cold_s: float, warm_s: float) -> Pair:
    return Pair(Launch(cold_s, 4.5, 4, 4), Launch(warm_s, 4.5, 4, 4))


DONE = [
    {"jamba": {OURS: pair(30, 9), OTHER: pair(90, 20), PLAIN: pair(60, 10)}},
    {"jamba": {OURS: pair(40, 8), OTHER: pair(80, 20), PLAIN: pair(32, 10)}},
    {"jamba": {OURS: pair(33, 10)}},  # the others are still to come
]


def test_ratios_are_medians_of_those_within_a_round() -> None:
    assert first_step.ratios(DONE, "jamba", OTHER) == {
        "cold": (30 / 90 + 40 / 80) / 2,
        "warm": (9 / 90 + 8 / 80) / 2,
    }
    assert first_step.ratios(DONE[2:], "jamba", OTHER) == {}


def test_a_row_for_each_way() -> None:
    head, *rows = first_step.table(DONE).splitlines()
    assert head.split()[:2] == ["model", "way"]
    assert [row.split()[-1] for row in rows] == ["4/4", "0.10", "0.20"]
    assert rows[0].split()[2:4] == ["33.0", "9.0"]
