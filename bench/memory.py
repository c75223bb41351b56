"""Time of a training step against its peak of memory: graphshard under a sweep of budgets, FSDP2
by hand.

    python bench/memory.py --config S --gbit 0.8 --json OUT.json --svg OUT.svg
    python bench/memory.py --host-gb-s 2 --budgets 8 --json OUT.json

On the emulated network (bench/emulator). FSDP2 is tuned, its blocks compiled by Inductor, and
reshards all, half or none of them after forward: three points. The budgets go from the least that
fits, with nothing on a host, to the highest of their peaks. In each of their launches another
training, of a plan without a budget, takes turns with the one that is measured: the ratio of what
compute takes is in the table, and what the plans say of it. With --host-gb-s there is a host beside
the device, over a link of that rate: each budget is planned with activations that the host may hold
and without. Each launch is a fresh process; all take turns. A table on stdout, progress on stderr,
the same as a picture.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, rounds  # noqa: E402
from bench.launch import Rate, Request  # noqa: E402
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

    budget_bytes: None for FSDP2. offload: the host may hold activations; it holds held_bytes of
    them. busy_us: of the step what compute did not wait. busy_ratio: to that of a plan without a
    budget, which took turns with it. predicted_*: by the plan, without the optimizer. failed: why
    nothing was measured.
    """

    name: str
    budget_bytes: int | None
    step_us: float = 0.0
    peak_bytes: int = 0
    failed: str = ""
    offload: bool = False
    busy_us: float = 0.0
    held_bytes: int = 0
    predicted_us: float = 0.0
    predicted_busy_us: float = 0.0
    predicted_peak_bytes: int = 0
    busy_ratio: float = 0.0
    predicted_busy_ratio: float = 0.0


def measured(spots: Sequence[Spot], request: Request, num_launches: int) -> list[Spot]:
    """`spots` with their numbers."""
    found: dict[Spot, list[Rate]] = {spot: [] for spot in spots}
    failed: set[Spot] = set()
    for index in range(num_launches):
        for spot in turns(spots, index):
            if spot in failed:
                continue
            try:
                rate = launch(asked(request, spot)).rates[0]
            except RuntimeError as error:
                if "GS601" not in str(error):
                    raise
                failed.add(spot)
                continue
            found[spot].append(rate)
            say(f"[{index + 1}/{num_launches}] {spot.name}: {step_median(rate, 'step_us'):,.0f} us")
    return [
        replace(spot, failed="does not fit") if spot in failed else with_numbers(spot, rates)
        for spot, rates in found.items()
    ]


def asked(request: Request, spot: Spot) -> Request:
    planned = spot.budget_bytes is not None
    return replace(
        request,
        mode=PLANNED if planned else spot.name,
        budget_bytes=spot.budget_bytes,
        offload="auto" if spot.offload else "never",
        beside=planned,
    )


def with_numbers(spot: Spot, rates: Sequence[Rate]) -> Spot:
    exposed_us = median(step_median(rate, "exposed_us") for rate in rates)
    step_us, last = median(step_median(rate, "step_us") for rate in rates), rates[-1]
    return replace(
        spot,
        step_us=step_us,
        busy_us=step_us - exposed_us,
        peak_bytes=max(rate.peak_bytes for rate in rates),
        held_bytes=last.held_bytes,
        predicted_us=last.predicted_us,
        predicted_busy_us=last.predicted_us - last.predicted_exposed_us,
        predicted_peak_bytes=last.predicted_peak_bytes,
        busy_ratio=median(rate.busy_ratio for rate in rates),
        predicted_busy_ratio=last.predicted_busy_ratio,
    )


def least_budget(request: Request) -> int:
    """The least that a plan fits, nothing offloaded, as its error says it."""
    try:
        launch(asked(request, Spot("", 1)))
    except RuntimeError as error:
        found = re.search(r"a budget of [^(]* \(([\d,]+) bytes\)", str(error))
        if found is None:
            raise
        return int(found[1].replace(",", ""))
    raise AssertionError("a budget of one byte fits")


def budgets(start: int, highest: int, count: int, *, offload: bool = False) -> list[Spot]:
    """Evenly from `start` to the highest peak."""
    sizes = [int(start + (highest - start) * i / (count - 1)) for i in range(count)]
    more = ", host" if offload else ""
    return [Spot(f"budget {size / 1e6:.1f} MB{more}", size, offload=offload) for size in sizes]


def render(spots: Sequence[Spot]) -> str:
    """Without the optimizer's time, which is in no plan, predictions are the smaller ones."""
    titles = (
        "step ms", "plan ms", "busy ms", "plan ms", "ratio", "plan", "peak MB", "plan MB", "held MB"
    )  # fmt: skip
    lines = [f"{'':<24}" + "".join(f"{title:>9}" for title in titles)]
    for spot in sorted(spots, key=lambda s: (s.budget_bytes or 0, s.offload, s.name)):
        times = (spot.step_us, spot.predicted_us, spot.busy_us, spot.predicted_busy_us)
        sizes = (spot.peak_bytes, spot.predicted_peak_bytes, spot.held_bytes)
        ratios = (spot.busy_ratio, spot.predicted_busy_ratio)
        numbers = [*_cells((us / 1e3 for us in times), 1), *_cells(ratios, 3)]
        numbers += _cells((size / 1e6 for size in sizes), 1)
        lines.append(f"{spot.name:<24}{spot.failed or ''.join(numbers)}".rstrip())
    return "\n".join(lines)


def _cells(numbers: Iterable[float], digits: int) -> list[str]:
    return [f"{number:>9.{digits}f}" if number else f"{'':>9}" for number in numbers]


def picture(spots: Sequence[Spot], title: str) -> str:
    """An SVG: FSDP2's settings as marks, the budgets as a line."""
    found = [spot for spot in spots if not spot.failed]
    planned, held = (
        tuple(place(s) for s in found if s.budget_bytes is not None and s.offload == offload)
        for offload in (False, True)
    )
    by_hand = [
        Series(BY_NAME[spot.name].title, (place(spot),)) for spot in found if not spot.budget_bytes
    ]
    ours = [Series("graphshard, one for each budget", planned)]
    ours += [Series("graphshard, with a host", held)] if held else []
    return front_svg([Panel(title, (*ours, *by_hand))])


def place(spot: Spot) -> front.Spot:
    return front.Spot(spot.peak_bytes, spot.step_us)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a step against its peak of memory.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--gbit", type=float, default=0.8, help="rate of the link")
    parser.add_argument("--alpha-us", type=float, default=300.0, help="latency of a collective")
    parser.add_argument("--host-gb-s", type=float, default=0.0, help="of a link to a host")
    parser.add_argument("--budgets", type=int, default=7)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a launch")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--svg", type=Path, help="write a picture to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    request = Request(
        "", args.config, args.ranks, (args.gbit,), args.alpha_us, args.steps,
        host_gb_s=args.host_gb_s,
    )  # fmt: skip
    emulator.load_extension()  # compiled once, here
    with tempfile.TemporaryDirectory() as folder:
        say("calibrating compute")
        python("-m", "bench.profile", folder, args.config, str(args.ranks))
        request = replace(request, compute=folder)
        by_hand = [Spot(name, None) for name in FSDP2]
        found = [spot.peak_bytes for spot in measured(by_hand, replace(request, num_steps=1), 1)]
        start = least_budget(request)
        planned = budgets(start, max(found), args.budgets)
        if args.host_gb_s:
            planned += budgets(start, max(found), args.budgets, offload=True)
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
