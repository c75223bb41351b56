"""How long `graphshard plan` takes for large models within a budget, from start to end.

    python bench/plan_time.py --against CHECKOUT --json OUT.json

Each launch is a fresh process without a cache of plans; cases and checkouts take turns. The time
counts from the start of Python to its end, imports included. Medians on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.rounds import say  # noqa: E402

OURS, OTHER = "graphshard", "other checkout"


@dataclass(frozen=True, slots=True)
class Case:
    """target: FILE.py:FUNCTION, as `graphshard plan` takes it."""

    target: str
    world_size: int
    machine: str
    budget: str

    @property
    def title(self) -> str:
        function = self.target.partition(":")[2]
        return f"{function}, {self.world_size:,} x {self.machine}, {self.budget}"


CASES = (
    Case("bench/plan_models.py:bare_8b", 64, "h100-ib400", "40GiB"),
    Case("bench/plan_models.py:bare_8b", 64, "h100-ethernet100", "60GiB"),
    Case("examples/llama.py:llama3_70b", 512, "h100-ib400", "45GiB"),
    Case("examples/llama.py:llama3_70b", 512, "h100-ethernet100", "70GiB"),
    Case("examples/llama.py:llama3_405b", 1024, "h100-ib400", "75GiB"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    case: str
    way: str
    took_s: float


def launch(case: Case, way: str, root: Path) -> Launch:
    """Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        rounds.python(
            *("-m", "graphshard.cli", "plan"),
            str(ROOT / case.target),
            *("--world", str(case.world_size), "--hw", case.machine, "--budget", case.budget),
            *("--compute", "inductor", "-o", str(Path(folder) / "plan.json")),
            environment={"GRAPHSHARD_CACHE_DIR": folder, "PYTHONPATH": str(root)},
            cwd=root,
        )
        return Launch(case.title, way, time.perf_counter() - began_s)


def run(launches: int, against: Path | None) -> Iterator[Launch]:
    ways = {OURS: ROOT, **({OTHER: against.resolve()} if against else {})}
    for index in range(launches):
        for case in CASES:
            for way in rounds.turns(list(ways), index):
                found = launch(case, way, ways[way])
                say(f"[round {index + 1} of {launches}] {found.case}, {way}: {found.took_s:.1f} s")
                yield found


def table(done: Sequence[Launch]) -> str:
    lines = []
    for title in dict.fromkeys(one.case for one in done):
        for way in dict.fromkeys(one.way for one in done):
            times_s = [one.took_s for one in done if (one.case, one.way) == (title, way)]
            if times_s:
                lines.append(f"{title:<48} {way:<16} {median(times_s):>7.1f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds that planning takes.")
    parser.add_argument("--against", type=Path, help="another checkout of graphshard")
    parser.add_argument("--launches", type=int, default=3, help="of each")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    result = rounds.header("plan_time.py", args.against)
    done: list[Launch] = []
    for found in run(args.launches, args.against):
        done.append(found)
        result["launches"] = [asdict(one) for one in done]
        if args.json:
            rounds.write(args.json, result)
    print(table(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
