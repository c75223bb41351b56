"""Architectures of other people's libraries: eager FSDP2 and graphshard, bit by bit, on 2 ranks.

`make test-models` follows all of them, and finds the table of docs/architectures.md again, which
`GRAPHSHARD_WRITE_FIGURES=1` writes. `make test-models MODELS="llama t5"` follows these only.
"""

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from follow import EQUAL, Followed, follow
from pool import Pool
from zoo import ZOO

from bench.figures import compare, filled

PAGE = Path(__file__).parents[2] / "docs/architectures.md"
MAKER = "make test-models"
CHOSEN = os.environ.get("GRAPHSHARD_MODELS", "").split() or list(ZOO)
LIMIT_S = 180.0
LEAST = 52 / 60  # of all architectures: equal, and in one graph

pytestmark = [pytest.mark.dist, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def found() -> dict[str, Followed]:
    return {}


@pytest.mark.parametrize("name", CHOSEN)
def test_is_what_eager_fsdp2_computes(pool: Pool, name: str, found: dict[str, Followed]) -> None:
    """Or as far from it as what AOTAutograd makes of the model without any sharding."""
    ranks = pool.run(2, follow, name, timeout_s=LIMIT_S)
    found[name] = one = next((r for r in ranks if r.verdict != EQUAL), ranks[0])
    assert one.verdict == EQUAL or one.alone != EQUAL, one.why


def test_the_table_is_what_was_found(found: dict[str, Followed]) -> None:
    if len(found) < len(ZOO):
        pytest.skip("the table is made of all architectures")
    good = sum(one.verdict == EQUAL and one.in_one_graph for one in found.values())
    assert good >= LEAST * len(found)
    compare(PAGE, filled(PAGE.read_text(), {MAKER: _table(found, good)}))


def _table(found: Mapping[str, Followed], good: int) -> str:
    libraries = dict.fromkeys(ZOO[name].library for name in found)
    versions = " and ".join(f"{library} {version(library)}" for library in libraries)
    lines = [
        f"{good} of {len(found)} run in one graph and are equal to the last bit; with {versions}.",
        "",
        "| architecture | library | groups in graphs | graphs | against eager | |",
        "|---|---|---|---|---|---|",
        *(_row(name, one) for name, one in found.items()),
    ]
    return "\n".join([*lines, ""])


def _row(name: str, one: Followed) -> str:
    remarks = [_shown(why) for why in one.breaks]
    if one.verdict != EQUAL:
        remarks.append(f"`aot_eager` without sharding {one.alone.partition(':')[0]} too")
    groups = f"{one.in_graphs} of {one.groups}"
    return (
        f"| {name} | {ZOO[name].library} | {groups} | {one.graphs} | {one.verdict} | "
        f"{'; '.join(remarks)} |"
    )


def _shown(why: str) -> str:
    """Without the folders of this machine, and what differs between versions of Python."""
    begin, _, place = why.rpartition(" /")
    return f"{begin} {place.rpartition('site-packages/')[2]}" if place else why
