"""Whether a run without options finds the right plan again when the network changes its rate.

    python bench/adapt.py --gbit 2,0.5 --json OUT.json

Two processes over real sockets with a limited rate (bench/netns; needs root). A run begins at the
first rate and goes on at the second; another begins at the second. Its steps, from the 20th after
the change on, are held against those of the other. Then a run at the first rate, beside a process
that is busy half of the time: how often did it change its plan? A table on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import netns, rounds  # noqa: E402
from bench.adapt_rank import Request, Trained  # noqa: E402
from bench.models import CONFIGS  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.step import numbers  # noqa: E402

SETTLE = 16  # steps until a plan has settled, with some to spare
USUAL = 12  # steps after that, to know what they take
ADAPT = 30  # steps until it has settled again
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of steps in milliseconds.

    before: at the first rate. at_once: the first steps at the second. adapted: the steps after
    ADAPT. planned: of the run that began at the second rate. adapted_after: steps from the change
    until the plan was another one; None: it never was.
    """

    before_ms: float
    at_once_ms: float
    adapted_ms: float
    planned_ms: float
    adapted_after: int | None

    @property
    def ratio(self) -> float:
        return self.adapted_ms / self.planned_ms


def launch(network: netns.Namespaces, request: Request) -> Trained:
    """The slower rank's steps; plans are the same on both. With a cache of its own: nothing is
    remembered. Raises RuntimeError if a rank fails."""
    netns.limit(network, request.rates[0][0])
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", f"PYTHONPATH={ROOT}", f"GRAPHSHARD_CACHE_DIR={folder}", sys.executable]
        command += ["-m", "bench.adapt_rank", json.dumps(asdict(request))]
        outputs = netns.launch(network, command, LIMIT_S)
    ranks: list[Any] = [rounds.last_line(output) for output in outputs]
    if ranks[0]["plan"] != ranks[1]["plan"]:
        raise RuntimeError("the ranks ran different plans")
    steps = tuple(map(max, *(rank["step_us"] for rank in ranks)))
    return Trained(steps, tuple(ranks[0]["plan"]), tuple(ranks[0]["loss"]))


def result(changed: Trained, fresh: Trained) -> Result:
    change = SETTLE + USUAL
    after = changed.plan[change:]
    others = [place for place, plan in enumerate(after) if plan != changed.plan[change - 1]]
    return Result(
        before_ms=median(changed.step_us[SETTLE:change]) / 1e3,
        at_once_ms=median(changed.step_us[change : change + 8]) / 1e3,
        adapted_ms=median(changed.step_us[change + ADAPT :]) / 1e3,
        planned_ms=median(fresh.step_us[SETTLE:]) / 1e3,
        adapted_after=others[0] if others else None,
    )


def num_changes(trained: Trained) -> int:
    """How often the plan changed after it had settled."""
    settled = trained.plan[SETTLE:]
    return sum(now != before for before, now in pairwise(settled))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A network that changes its rate.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--gbit", type=numbers, default=(2.0, 0.5), help="before and after")
    parser.add_argument("--launches", type=int, default=3, help="of each pair")
    parser.add_argument("--noisy-steps", type=int, default=200, help="0: not tried")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    if (reason := netns.missing()) is not None:
        say(f"error: {reason}")
        return 2
    first, second = args.gbit
    found: dict[str, Any] = {**rounds.header("adapt.py"), "config": args.config, "launches": []}
    with netns.joined("adapt") as network:
        for index in range(args.launches):
            rates = ((first, SETTLE + USUAL), (second, ADAPT + USUAL))
            changed = launch(network, Request(args.config, rates))
            fresh = launch(network, Request(args.config, ((second, SETTLE + USUAL),)))
            own = result(changed, fresh)
            found["launches"].append(
                {**asdict(own), "changed": asdict(changed), "fresh": asdict(fresh)}
            )
            print(
                f"{first:g} gbit {own.before_ms:.0f} ms; {second:g} gbit {own.at_once_ms:.0f} ms, "
                f"another plan after {own.adapted_after} steps, from step {ADAPT} on "
                f"{own.adapted_ms:.0f} ms: {own.ratio:.3f} of {own.planned_ms:.0f} ms as planned",
                flush=True,
            )
            say(f"[{index + 1}/{args.launches}]")
            if args.json:
                rounds.write(args.json, found)
        if args.noisy_steps:
            noisy = launch(network, Request(args.config, ((first, args.noisy_steps),), noisy=True))
            found["noisy"] = asdict(noisy)
            print(f"{num_changes(noisy)} changes in {args.noisy_steps} steps beside a busy process")
            if args.json:
                rounds.write(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
