"""What every test shares: the import path of the helpers and the pool of worker processes."""

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


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """This run's worker processes: `pool.run(2, fn, *args)` runs `fn(ctx, *args)` on 2 ranks.

    Plans of earlier runs are none of this run's.
    """
    with tempfile.TemporaryDirectory(prefix="graphshard-cache-") as folder, Pool() as workers:
        os.environ["GRAPHSHARD_CACHE_DIR"] = folder
        yield workers
