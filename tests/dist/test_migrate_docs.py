"""docs/migrate.md: its scripts run on two ranks and train alike, and it shows what they contain."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm import run_script

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migrate.md").read_text()
SCRIPTS = sorted((ROOT / "examples/migrate").glob("*_*.py"))
# The first is what all others are compared with; DeepSpeed is not installed.
ORACLE = ROOT / "examples/migrate/fsdp2_before.py"
COMPARED = [p for p in SCRIPTS if p.name not in (ORACLE.name, "deepspeed_before.py")]
# Of a loss: sums of float32 in another order (DDP's buckets, FSDP1's flat parameters), 3 steps.
TOLERANCE = 1e-5
# A block of Python, with the name of the script that it is from.
BLOCK = re.compile(r"`examples/migrate/(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", re.DOTALL)


def said(stdout: str) -> dict[str, float]:
    """What rank 0 prints: each line is words and a number."""
    pairs = (line.rsplit(" ", 1) for line in stdout.splitlines())
    return {words: float(number) for words, number in pairs}


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    """Of eager FSDP2, launched as the page says; the other scripts are compared with it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(ORACLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = said(done.stdout)
    assert len(found) == 4
    assert found["loss 0"] > found["loss 2"] > 0
    return found


@pytest.mark.parametrize("script", COMPARED, ids=lambda path: path.stem)
def test_every_script_trains_alike(script: Path, expected: dict[str, float]) -> None:
    found = said(run_script(script, 2, limit_s=250))
    assert list(found) == list(expected)
    worst = max(abs(found[name] / value - 1) for name, value in expected.items())
    print(f"{script.name}: within {worst:.1e}")
    assert worst <= TOLERANCE


def test_the_page_shows_what_the_scripts_contain() -> None:
    found = BLOCK.findall(PAGE)
    assert sorted({name for name, _ in found}) == [path.name for path in SCRIPTS]
    for name, shown in found:
        text = (ROOT / "examples/migrate" / name).read_text()
        # "..." stands for lines that are left out.
        for part in shown.split("...\n"):
            assert part.strip("\n") in text, f"{name}: {part}"


def test_the_page_is_linked() -> None:
    assert "docs/migrate.md" in (ROOT / "README.md").read_text()
