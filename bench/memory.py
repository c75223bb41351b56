"""Time of a training step against its peak of memory: graphshard under a sweep of budgets, FSDP2
by hand.

    python bench/memory.py --config S --gbit 0.8 --json OUT.json --svg OUT.svg

On the emulated network (bench/emulator). FSDP2 is tuned, its blocks compiled by Inductor, and
reshards all, half or none of them after forward: three points. The budgets lie between the lowest
and the highest of their peaks, and one below. Each launch is a fresh process; all take turns. A
table on stdout, progress on stderr, the same as a picture.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, rounds  # noqa: E402
from bench.launch import Request  # noqa: E402
from bench.models import CONFIGS  # noqa: E402
from bench.modes import BY_NAME  # noqa: E402
from bench.rounds import python, say, turns  # noqa: E402
from bench.step import launch  # noqa: E402
from bench.table import step_median  # noqa: E402
from graphshard.view import front  # noqa: E402
from graphshard.view.front import Panel, Series, front_svg  # noqa: E402

FSDP2 = ("blocks_tuned", "blocks_tuned_half", "blocks_tuned_keep")
PLANNED = "fused_low"  # with a budget of its own here


@dataclass(frozen=True, slots=True)
class Spot:
    """One setting: medians over launches of the step, and the most that a launch held.

    budget_bytes: None for FSDP2. failed: why nothing was measured.
    """

    name: str
    budget_bytes: int | None
    step_us: float = 0.0
    peak_bytes: int = 0
    failed: str = ""


def measured(spots: Sequence[Spot], request: Request, num_launches: int) -> list[Spot]:
    """`spots` with their numbers."""
    steps: dict[Spot, list[float]] = {spot: [] for spot in spots}
    peaks: dict[Spot, int] = dict.fromkeys(spots, 0)
    failed: dict[Spot, str] = {}
    for index in range(num_launches):
        for spot in turns(spots, index):
            if spot in failed:
                continue
            mode = spot.name if spot.budget_bytes is None else PLANNED
            try:
                found = launch(replace(request, mode=mode, budget_bytes=spot.budget_bytes))
            except RuntimeError as error:
                if "GS601" not in str(error):
                    raise
                failed[spot] = "does not fit"
                continue
            rate = found.rates[0]
            steps[spot].append(step_median(rate, "step_us"))
            peaks[spot] = max(peaks[spot], rate.peak_bytes)
            say(f"[{index + 1}/{num_launches}] {spot.name}: {steps[spot][-1] / 1e3:.1f} ms")
    return [
        replace(
            spot,
            step_us=median(steps[spot]) if steps[spot] else 0.0,
            peak_bytes=peaks[spot],
            failed=failed.get(spot, ""),
        )
        for spot in spots
    ]


def budgets(lowest: int, highest: int, count: int) -> list[Spot]:
    """From 5 % below the lowest peak to the highest."""
    start = 0.95 * lowest
    sizes = [int(start + (highest - start) * i / (count - 1)) for i in range(count)]
    return [Spot(f"budget {size / 1e6:.1f} MB", size) for size in sizes]


def render(spots: Sequence[Spot]) -> str:
    lines = [f"{'':<22}{'step ms':>9}{'peak MB':>9}{'budget MB':>11}"]
    for spot in sorted(spots, key=lambda s: (s.budget_bytes is not None, s.peak_bytes)):
        budget = "" if spot.budget_bytes is None else f"{spot.budget_bytes / 1e6:.1f}"
        step = spot.failed or f"{spot.step_us / 1e3:.1f}"
        peak = "" if spot.failed else f"{spot.peak_bytes / 1e6:.1f}"
        lines.append(f"{spot.name:<22}{step:>9}{peak:>9}{budget:>11}")
    return "\n".join(lines)


def picture(spots: Sequence[Spot], title: str) -> str:
    """An SVG: FSDP2's settings as marks, the budgets as a line."""
    found = [spot for spot in spots if not spot.failed]
    planned = tuple(map(place, (spot for spot in found if spot.budget_bytes is not None)))
    by_hand = [
        Series(BY_NAME[spot.name].title, (place(spot),)) for spot in found if not spot.budget_bytes
    ]
    return front_svg([Panel(title, (Series("graphshard, one for each budget", planned), *by_hand))])


def place(spot: Spot) -> front.Spot:
    return front.Spot(spot.peak_bytes, spot.step_us)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a step against its peak of memory.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--gbit", type=float, default=0.8, help="rate of the link")
    parser.add_argument("--alpha-us", type=float, default=300.0, help="latency of a collective")
    parser.add_argument("--budgets", type=int, default=7)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a launch")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--svg", type=Path, help="write a picture to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    request = Request("", args.config, args.ranks, (args.gbit,), args.alpha_us, args.steps)
    emulator.load_extension()  # compiled once, here
    with tempfile.TemporaryDirectory() as folder:
        say("calibrating compute")
        python("-m", "bench.profile", folder, args.config, str(args.ranks))
        request = replace(request, compute=folder)
        by_hand = [Spot(name, None) for name in FSDP2]
        found = [spot.peak_bytes for spot in measured(by_hand, replace(request, num_steps=1), 1)]
        planned = budgets(min(found), max(found), args.budgets)
        spots = measured([*by_hand, *planned], request, args.launches)
    title = f"config {args.config}, {args.ranks} ranks (emulated), {args.gbit:g} gbit"
    print(f"{title}, {args.launches} launches of each, virtual clock\n\n{render(spots)}")
    if args.json:
        rows = [asdict(spot) for spot in spots]
        rounds.write(args.json, {**rounds.header("memory.py"), "title": title, "spots": rows})
    if args.svg:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(picture(spots, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
