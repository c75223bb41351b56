"""A training step on one process: graphshard's compute against plain torch.compile's.

    python bench/single.py --json OUT.json

Without sharding, and with fully_shard over one rank, each against `torch.compile(model)` with
Inductor. A launch is a fresh process in which the ways take turns, step by step, so that they share
what the machine does; its number is the median of the ratios of neighbouring steps. Time is the
CPU time of the thread that computes. Tables on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.interval import Comparison, compare, verdict  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.single_launch import DEMO, Measured, Request  # noqa: E402
from bench.step import LossesDiffer  # noqa: E402

PLAIN = "inductor"
TARGETS = {"graphshard_single": 1.03, "graphshard": 1.03}
MODELS = f"{DEMO},S"


def launch(request: Request) -> Measured:
    """One launch. Raises RuntimeError if it fails, LossesDiffer."""
    data: Any = rounds.last_line(
        rounds.python("-m", "bench.single_launch", json.dumps(asdict(request)))
    )
    measured = Measured(**data)
    expected = measured.losses[PLAIN]
    for way, loss in measured.losses.items():
        if not abs(loss - expected) <= 1e-5 * abs(expected):
            raise LossesDiffer(f"{way} has loss {loss!r}, {PLAIN} {expected!r}")
    return measured


def ratio(measured: Measured, way: str) -> float:
    pairs = zip(measured.steps_ms[way], measured.steps_ms[PLAIN], strict=True)
    return median(ours / plain for ours, plain in pairs)


def comparisons(model: str, launches: Sequence[Measured]) -> list[Comparison]:
    return [
        compare(f"{model}, {way}", PLAIN, target, [(ratio(m, way), 1.0) for m in launches])
        for way, target in TARGETS.items()
    ]


def render(model: str, launches: Sequence[Measured]) -> str:
    typical = {way: median(median(m.steps_ms[way]) for m in launches) for way in (PLAIN, *TARGETS)}
    lines = [f"{model}: median step in ms: {', '.join(f'{w} {t:.1f}' for w, t in typical.items())}"]
    for way, (count, distinct) in launches[-1].regions.items():
        lines.append(f"{way}: {count} regions, {distinct} of them distinct")
    return "\n".join([*lines, *map(verdict, comparisons(model, launches))])


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compute on one process, against torch.compile.")
    parser.add_argument("--models", default=MODELS, help="demo, or configurations of bench.models")
    parser.add_argument("--launches", type=int, default=6, help="6 give 95 %%")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each way")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    result: dict[str, object] = {**rounds.header("single.py"), "steps": args.steps}
    for model in args.models.split(","):
        launches: list[Measured] = []
        for index in range(args.launches):
            launches.append(launch(Request(model, (PLAIN, *TARGETS), args.steps, index)))
            told = ", ".join(f"{way} {ratio(launches[-1], way):.3f}" for way in TARGETS)
            say(f"[{model} {index + 1}/{args.launches}] of {PLAIN}: {told}")
        result[model] = {
            "targets": [{**asdict(c), "met": c.met} for c in comparisons(model, launches)],
            "launches": [asdict(m) for m in launches],
        }
        if args.json:
            rounds.write(args.json, result)
        print(render(model, launches) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
