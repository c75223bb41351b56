"""Time to the first step, and to a step of another length, of models of identical blocks.

    python bench/compile_time.py --blocks 4,16,64 --json OUT.json

The first step counts from the torch.compile call to the end of the first forward and backward, in
real seconds. A cold launch begins with empty caches of torch and graphshard, in a folder of its
own; a warm one is the next process with the same folder. In each, two more lengths of the sequence
follow: the first of them compiles anew wherever lengths were taken to be constant. FSDP2 is
compiled block by block, as is usual with it; SimpleFSDP as one graph, Inductor's overlap passes
off. Each launch is a fresh process with one thread; the ways take turns. A launch that passes the
time limit is ended and counts as the limit, "> N". Tables on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import compile_table, emulator, peers, rounds  # noqa: E402
from bench.compile_launch import Measured, Request, Step  # noqa: E402
from bench.compile_table import Launch, Pair, Rounds  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.ways import Way, choose, usable  # noqa: E402

MODES = "fsdp2_blocks,simple_fsdp,graphshard_aten,graphshard"
LENGTHS = (64, 48, 40)
DIM = 64
COMPILED = (".so", ".gch")  # files that a run of the C++ compiler leaves


def caches(folder: Path) -> dict[str, str]:
    """Where torch, Triton and graphshard keep what they compile: below `folder`."""
    places = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "GRAPHSHARD_CACHE_DIR": "graphshard",
        "XDG_CACHE_HOME": "home",
    }
    return {name: str(folder / place) for name, place in places.items()}


def compiled_files(folder: Path) -> int:
    return sum(path.suffix in COMPILED for path in folder.rglob("*"))


def launch(request: Request, folder: Path, limit_s: float) -> Launch:
    """One launch. Raises RuntimeError if it fails."""
    before, began = compiled_files(folder), time.perf_counter()
    measured = None
    try:
        stdout = rounds.python(
            "-m", "bench.compile_launch", json.dumps(asdict(request)),
            environment=caches(folder), limit_s=limit_s,
        )  # fmt: skip
        data: Any = rounds.last_line(stdout)
        measured = Measured(**{**data, "steps": [Step(**step) for step in data["steps"]]})
    except rounds.TookTooLong:
        pass
    wall_s = time.perf_counter() - began
    return Launch(measured, wall_s, compiled_files(folder) - before, limit_s)


def launch_pair(request: Request, limit_s: float, prefix: str) -> Pair:
    """Cold, then warm. A cold launch that took too long stands for its warm one too."""
    with tempfile.TemporaryDirectory() as name:
        cold = launch(request, Path(name), limit_s)
        warm = cold if cold.measured is None else launch(request, Path(name), limit_s)
    say(
        f"{prefix} {request.way}, {request.num_blocks} blocks: cold {cold.text()} s, "
        f"warm {warm.text()} s; C++ compiler: {cold.compiler_runs} and {warm.compiler_runs} runs"
    )
    return Pair(cold, warm)


def run_rounds(
    ways: Sequence[Way], args: argparse.Namespace
) -> Iterator[dict[str, dict[int, Pair]]]:
    """name of the way -> number of blocks -> pair, the same dict after each pair of its round.

    A size that took a way too long is not tried again.
    """
    late: dict[tuple[str, int], Pair] = {}
    for index in range(args.launches):
        found: dict[str, dict[int, Pair]] = {}
        for way in rounds.turns(ways, index):
            if index >= args.launches_of.get(way.name, args.launches):
                continue
            found[way.name] = {}
            for num_blocks in args.blocks:
                request = Request(way.name, num_blocks, args.ranks, args.dim, LENGTHS)
                pair = late.get((way.name, num_blocks)) or launch_pair(
                    request, args.limit_s, f"[round {index + 1} of {args.launches}]"
                )
                if pair.cold.measured is None:
                    late[way.name, num_blocks] = pair
                found[way.name][num_blocks] = pair
                yield found


def measure(args: argparse.Namespace, ways: Sequence[Way]) -> str:
    """All rounds; the tables. The file is written after each pair of launches."""
    result: dict[str, object] = {
        **rounds.header("compile_time.py"),
        "setting": {"dim": args.dim, "lengths": LENGTHS, "ranks": args.ranks, "threads": 1},
    }
    done: Rounds = []
    loads = [os.getloadavg()]
    for found in run_rounds(ways, args):
        if not done or done[-1] is not found:
            done.append(found)
        loads.append(os.getloadavg())
        result["load_averages"] = loads
        result["rows"] = [asdict(row) for row in compile_table.make_rows(ways, done)]
        result["targets"] = [
            {**asdict(c), "met": c.met} for c in compile_table.comparisons(ways, done)
        ]
        result["launches"] = [
            {way: {n: asdict(pair) for n, pair in sizes.items()} for way, sizes in r.items()}
            for r in done
        ]
        if args.json:
            rounds.write(args.json, result)
    return compile_table.render(ways, done)


def counts(text: str) -> Mapping[str, int]:
    """Of an argument such as `simple_fsdp=2,fsdp2_blocks=3`."""
    return {name: int(count) for name, _, count in (p.partition("=") for p in text.split(","))}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first step, cold and warm.")
    parser.add_argument("--blocks", type=rounds.numbers, default=(4, 16, 64))
    parser.add_argument("--dim", type=int, default=DIM, help="width of a block")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--launches", type=int, default=6, help="pairs of each; 6 give 95 %%")
    parser.add_argument("--launches-of", type=counts, default={}, help="fewer: simple_fsdp=2")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of one launch")
    parser.add_argument("--modes", type=choose, default=choose(MODES), help=MODES)
    parser.add_argument("--smoke", action="store_true", help="one launch of tiny models")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    if args.smoke:
        args.blocks, args.dim, args.launches, args.ranks = (1, 2), 32, 1, 4
    return args


def main() -> int:
    args = arguments()
    try:
        ways = usable(args.modes)
    except peers.PeerMissing as error:
        say(f"error: {error}")
        return 1
    emulator.load_extension()  # compiled once, here
    tables = measure(args, ways)
    print(f"blocks of width {args.dim}, {args.ranks} ranks (emulated), {args.launches} launches\n")
    print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
