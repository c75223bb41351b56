"""What every test shares: the import path of the helpers, the pool of worker processes, and who
has the machine to itself."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Bits are compared with eager FSDP2; tests of compiled compute ask for it.
os.environ.setdefault("GRAPHSHARD_COMPUTE", "aten")

HERE = Path(__file__).parent
for folder in (HERE, HERE / "dist", HERE / "faults"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from pool import Pool  # noqa: E402 (needs the path above)
from warm import leave_out  # noqa: E402

leave_out()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """This run's worker processes: `pool.run(2, fn, *args)` runs `fn(ctx, *args)` on 2 ranks.

    Plans of earlier runs are none of this run's.
    """
    with tempfile.TemporaryDirectory(prefix="graphshard-cache-") as folder, Pool() as workers:
        os.environ["GRAPHSHARD_CACHE_DIR"] = folder
        yield workers


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the modules and the tests: collections pass them over


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that testers end together; those with tests that want
    the machine to themselves come last, when nobody waits for them any more."""
    turns = {item.path: 1 for item in items}
    for mark, turn in (("slow", 0), ("alone", 2)):
        turns |= {item.path: turn for item in items if item.get_closest_marker(mark)}
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `pytest -n`, a test marked `alone` runs while no other one does."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        yield
        return
    folder = Path(tempfile.gettempdir()) / f"graphshard-tests-{run}"
    folder.mkdir(exist_ok=True)
    alone = request.node.get_closest_marker("alone") is not None
    with (folder / "next").open("w") as following, (folder / "machine").open("w") as machine:
        fcntl.flock(following, fcntl.LOCK_EX)  # nobody overtakes the one who waits
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(following, fcntl.LOCK_UN)
        yield
