"""Predicted training steps against figures that others published (`bench/published.toml`).

No constant of the cost model is fitted to a row so far. What holds is asserted; what misses is
printed (`pytest -s`) and explained in docs/cost-model.md. All rows: `python bench/published.py`.
"""

from collections import Counter

import pytest

from bench.published import error_of, predictions, published
from graphshard.cost.reserved import reserved_bytes
from graphshard.schedule.estimate import Category
from graphshard.schedule.forecast import Forecast

TOKENS, MEMORY = 0.20, 0.10  # how far off a prediction may be
SEEN = [row for row in published() if row.split == "seen"]


def test_the_split_is_by_the_rule_that_the_file_states():
    rows = published()
    counts = Counter(row.split for row in rows)
    assert counts["fitted"] + counts["held_out"] >= 40
    assert len(rows) == len(set(rows))
    foundry = {"llm-foundry-h100": 2_048, "llm-foundry-a100": 2_048}
    lengths = {**foundry, "torchtitan-pr165": 4_096}
    for row in rows:
        is_fitted = row.gpus == 8 and row.seq == lengths.get(row.source)
        assert (row.split == "fitted") == is_fitted, row


@pytest.fixture(scope="module")
def found():
    return dict(predictions(SEEN))


@pytest.mark.slow  # the first row plans all of them: 22 s on two idle cores
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", SEEN, ids=[row.name for row in SEEN])
def test_published(row, found):
    told = found[row]
    tokens = error_of(told.tokens_per_s, row.tokens_per_s)
    print(f"\n{row.name}: {told.tokens_per_s:,.0f} tokens/s ({tokens:+.1%})")
    assert abs(tokens) <= TOKENS
    if row.memory_gib is None:
        return
    memory = error_of(told.reserved_gib, row.memory_gib)
    print(f"  {told.reserved_gib:.1f} GiB ({memory:+.1%})")
    # A captured graph saves less than eager selective checkpointing does.
    if row.compiled:
        assert abs(memory) <= MEMORY


def test_reserved_memory_is_that_of_each_stream_at_its_own_peak():
    forward = Forecast((), (), ((Category.ACTIVATION, (1, 5)), (Category.ALL_GATHER, (7, 2))))
    backward = Forecast(
        (),
        (),
        (
            (Category.ACTIVATION, (6, 1)),
            (Category.TEMP, (2, 3)),
            (Category.SHARDED_GRAD, (0, 4)),
        ),
    )
    assert reserved_bytes((forward, backward)) == 7 + 4 + 8
