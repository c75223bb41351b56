"""Time to the first step of tiny Hugging Face models, cold and warm.

    make .venv-integrations/.installed
    .venv-integrations/bin/python bench/first_step.py --against CHECKOUT --json OUT.json

The first step counts from the first call to the end of its backward, on rank 0, in real seconds.
Ways: graphshard on 2 gloo ranks, with the layers and the root as groups; the graphshard of another
checkout, if `--against` names one; plain Inductor on one process, without FSDP2. A cold launch
begins with empty caches in a folder of its own, a warm one is the next with that folder. Each
launch is a fresh process with one thread for each rank; the ways take turns. Ratios are medians of
those within a round. Tables on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.compile_time import caches  # noqa: E402
from bench.rounds import say  # noqa: E402

MODELS = ("bart", "gemma3", "deepseek_v3", "jamba")
OURS, OTHER, PLAIN = "graphshard", "other checkout", "inductor"


@dataclass(frozen=True, slots=True)
class Launch:
    """What `first_step_launch.py` says of one: seconds, the loss, groups in graphs and in all."""

    first_s: float
    loss: float
    captured: int
    groups: int


@dataclass(frozen=True, slots=True)
class Pair:
    cold: Launch
    warm: Launch


Round = dict[str, dict[str, Pair]]  # model -> way -> pair


def launch(model: str, way: str, other: Path | None, folder: Path, args: Any) -> Launch:
    """Raises RuntimeError if it fails, TookTooLong after the time limit."""
    root = other if way == OTHER else ROOT
    script = [str(ROOT / "bench" / "first_step_launch.py"), model]
    ranks = 1 if way == PLAIN else args.ranks
    command = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *script,
        "inductor" if way == PLAIN else "graphshard",
    ]
    stdout = rounds.python(
        *command,
        environment={**caches(folder), "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"},
        limit_s=args.limit_s,
    )
    found: Any = rounds.last_line(stdout)
    return Launch(**found)


def pair(model: str, way: str, other: Path | None, args: Any) -> Pair:
    with tempfile.TemporaryDirectory() as name:
        cold = launch(model, way, other, Path(name), args)
        return Pair(cold, launch(model, way, other, Path(name), args))


def run(args: argparse.Namespace) -> Iterator[list[Round]]:
    """All rounds so far, after each pair."""
    ways = [OURS, *([OTHER] if args.against else []), PLAIN]
    done: list[Round] = []
    for index in range(args.launches):
        done.append({})
        for model in args.models:
            done[-1][model] = {}
            for way in rounds.turns(ways, index):
                found = pair(model, way, args.against, args)
                done[-1][model][way] = found
                say(
                    f"[round {index + 1} of {args.launches}] {model}, {way}: cold "
                    f"{found.cold.first_s:.1f} s, warm {found.warm.first_s:.1f} s"
                )
                yield done


def ratios(done: Sequence[Round], model: str, way: str) -> dict[str, float]:
    """Ours over `way`, cold over cold; and our warm launch over its cold one."""
    both = [r[model] for r in done if {OURS, way} <= r.get(model, {}).keys()]
    if not both:
        return {}
    return {
        "cold": median(r[OURS].cold.first_s / r[way].cold.first_s for r in both),
        "warm": median(r[OURS].warm.first_s / r[way].cold.first_s for r in both),
    }


def table(done: Sequence[Round]) -> str:
    """Medians, and the ratios of ours to the others."""
    lines = ["model        way              cold s  warm s  groups  ours/cold  ours warm/cold"]
    for model in done[0]:
        for way in done[0][model]:
            pairs = [r[model][way] for r in done if way in r.get(model, {})]
            cold, warm = (median(getattr(p, k).first_s for p in pairs) for k in ("cold", "warm"))
            found = ratios(done, model, way)
            shares = "".join(f"{found[k]:>11.2f}" for k in ("cold", "warm")) if way != OURS else ""
            groups = f"{pairs[0].cold.captured}/{pairs[0].cold.groups}" if way != PLAIN else "-"
            lines.append(f"{model:<12} {way:<15} {cold:>7.1f} {warm:>7.1f} {groups:>7}{shares}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first step, cold and warm.")
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    parser.add_argument("--against", type=Path, help="another checkout of graphshard")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=3, help="pairs of each")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one launch")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    result = rounds.header("first_step.py", args.against)
    done: Sequence[Round] = []
    for done in run(args):
        result["launches"] = [
            {model: {way: asdict(p) for way, p in ways.items()} for model, ways in r.items()}
            for r in done
        ]
        result["ratios"] = {
            model: {
                way: found for way in ways if way != OURS and (found := ratios(done, model, way))
            }
            for model, ways in done[0].items()
        }
        if args.json:
            rounds.write(args.json, result)
    print(table(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
