"""Forward and backward on one CUDA device under a sweep of budgets: time and peak against the plan.

    python bench/gpu_memory.py --budgets 5 --json OUT.json

The model of `bench/gpu.py`. Ranks, but for this one, are emulated, and so is their network
(`bench/gpu_network.py`); compute, memory and the copies to the host are real. Against FSDP2, its
blocks compiled by Inductor, with every block checkpointed and with none: the budgets lie between
those two peaks. Each budget is planned with activations that the host may hold, and without. Each
launch is a fresh process; all take turns. `--smoke` runs a tiny model on the CPU, whose numbers say
nothing. A table on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.gpu import launch  # noqa: E402
from bench.gpu_launch import Measured, Request  # noqa: E402
from bench.memory import Spot, budgets, render  # noqa: E402
from bench.rounds import say, turns  # noqa: E402

NONE, FULL = "FSDP2, none checkpointed", "FSDP2, all checkpointed"
NETWORK = "h100-ib400"
# By then the plan was made again from measured times.
WARM_UP_STEPS = 14


@dataclass(slots=True)
class Sweep:
    """What was launched so far. failed: spots that do not fit."""

    request: Request
    cache: Mapping[str, str]
    path: Path | None
    title: str
    found: dict[Spot, list[Measured]] = field(default_factory=dict)
    failed: set[Spot] = field(default_factory=set)

    def launch(self, spot: Spot) -> None:
        """Once more, unless it does not fit. The file is written."""
        if spot in self.failed:
            return
        measured = self.found.setdefault(spot, [])
        began = time.monotonic()
        try:
            measured.append(launch(_asked(self.request, spot), self.cache))
        except RuntimeError as error:
            if "GS601" not in str(error):
                raise
            self.failed.add(spot)
            return
        took_s = time.monotonic() - began
        say(f"{spot.name}: {median(measured[-1].grads_us) / 1e3:.1f} ms ({took_s:.0f} s)")
        self.write()

    @property
    def spots(self) -> list[Spot]:
        return [
            replace(spot, failed="does not fit")
            if spot in self.failed
            else with_numbers(spot, measured)
            for spot, measured in self.found.items()
        ]

    def write(self) -> None:
        if self.path is None:
            return
        launches = [
            {"spot": spot.name, **asdict(one)} for spot, all_ in self.found.items() for one in all_
        ]
        rows = [asdict(spot) for spot in self.spots]
        result = {**rounds.header("gpu_memory.py"), "title": self.title, "spots": rows}
        rounds.write(self.path, {**result, "launches": launches})


def _asked(request: Request, spot: Spot) -> Request:
    if spot.budget_bytes is None:
        return replace(request, way="fsdp2_blocks", checkpointed=spot.name == FULL)
    options = {
        "memory_budget": spot.budget_bytes,
        "offload": "auto" if spot.offload else "never",
    }
    return replace(request, way="graphshard", options=options)


def with_numbers(spot: Spot, launches: Sequence[Measured]) -> Spot:
    told = launches[-1].expected
    spot = replace(
        spot,
        step_us=median(median(one.grads_us) for one in launches),
        peak_bytes=max(one.peak_bytes for one in launches),
    )
    if told is None:
        return spot
    return replace(
        spot,
        held_bytes=told.held_bytes,
        predicted_us=told.grads_us,
        predicted_peak_bytes=told.peak_bytes,
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and peak on one CUDA device by budget.")
    parser.add_argument("--config", default="1B")
    parser.add_argument("--ranks", type=int, default=64, help="all but one are emulated")
    parser.add_argument("--network", default=NETWORK, help="preset whose network is emulated")
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a launch")
    parser.add_argument("--smoke", action="store_true", help="one launch of a tiny model, CPU")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    args.device, args.warm_up = "cuda", WARM_UP_STEPS
    if args.smoke:
        args.config, args.device, args.warm_up = "tiny", "cpu", 1
        args.launches, args.steps, args.budgets = 1, 2, 2
    return args


def main() -> int:
    import torch

    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        say("error: no CUDA device; --smoke runs a tiny model on the CPU")
        return 1
    request = Request(
        "", args.config, args.device, args.steps, args.warm_up, args.ranks, args.network
    )
    title = f"{args.config}, {args.ranks} ranks (emulated), network of {args.network}"
    with rounds.inductor_cache(own=not args.smoke) as cache:
        sweep = Sweep(request, cache, args.json, title)
        by_hand = (Spot(FULL, None), Spot(NONE, None))
        for spot in by_hand:
            sweep.launch(spot)
        least, most = (spot.peak_bytes for spot in sweep.spots)
        if args.smoke:  # a CPU does not count its bytes
            least, most = 2**20, 2**30
        planned = [
            spot
            for offload in (True, False)
            for spot in budgets(least, most, args.budgets, offload=offload)
        ]
        for index in range(args.launches):
            for spot in turns((*planned, *(by_hand if index else ())), index):
                sweep.launch(spot)
    print(f"forward and backward, {title}\n\n{render(sweep.spots)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
