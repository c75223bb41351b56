"""A training step of two ranks over real sockets with a limited rate, graphshard against its peers.

    python bench/sockets.py --gbit 1,2 --json OUT.json

Two processes with gloo in network namespaces (bench/netns), so it needs root, and two cores that
nobody else uses: a step counts only where other processes took under QUIET of the machine. In a
launch all modes train in turns, step by step; its number for a mode is the median of what counts.
A table on stdout, progress on stderr. Exit status 1 if two modes have other losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import netns, rounds  # noqa: E402
from bench.interval import Interval, sign_interval  # noqa: E402
from bench.models import CONFIGS  # noqa: E402
from bench.modes import BY_NAME, MODES  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.sockets_rank import Measured, Request, Times  # noqa: E402
from bench.step import TOLERANCE, LossesDiffer, names, numbers  # noqa: E402

USUAL = "blocks_tuned,blocks_tuned_keep,simple_fsdp_4mb,fused,fused_free"
QUIET = 0.08
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Row:
    """kept: steps that count, of all launches. against, speedup: of graphshard's modes."""

    gbit: float
    mode: str
    step_us: float
    kept: int
    against: str = ""
    speedup: Interval | None = None


def launch(network: netns.Namespaces, request: Request) -> list[Measured]:
    """Both ranks. Raises RuntimeError if one fails, LossesDiffer."""
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "bench.sockets_rank"]
    command.append(json.dumps(asdict(request)))
    found = []
    for output in netns.launch(network, command, timeout_s=LIMIT_S):
        data: Any = rounds.last_line(output)
        steps = {mode: [Times(**t) for t in times] for mode, times in data["steps"].items()}
        found.append(Measured(steps, data["losses"]))
    expected = found[0].losses[request.modes[0]]
    for mode, losses in found[0].losses.items():
        for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
            if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
                raise LossesDiffer(f"step {step}: {mode} has loss {ours!r}, not {theirs!r}")
    return found


def quiet_steps(ranks: Sequence[Measured], mode: str) -> list[float]:
    """Microseconds of the steps, the slower rank's, in which the machine was ours."""
    kept = []
    for times in zip(*(rank.steps[mode] for rank in ranks), strict=True):
        wall_us = max(t.wall_us for t in times)
        others_us = times[0].machine_us - sum(t.own_us for t in times)
        if others_us < QUIET * wall_us * (os.cpu_count() or 1):
            kept.append(wall_us)
    return kept


def make_rows(
    gbit: float, modes: Sequence[str], launches: Sequence[Sequence[Measured]]
) -> list[Row]:
    """Launches in which a mode has no quiet step are left out of its pairs."""
    kept = {mode: [quiet_steps(ranks, mode) for ranks in launches] for mode in modes}
    typical = {mode: [median(s) if s else None for s in found] for mode, found in kept.items()}
    medians = {
        mode: median([t for t in found if t is not None] or [0.0])
        for mode, found in typical.items()
    }
    peers = [mode for mode in modes if BY_NAME[mode].is_peer and medians[mode]]
    best = min(peers, key=medians.__getitem__) if peers else ""
    rows = []
    for mode in modes:
        speedup = None
        if BY_NAME[mode].is_ours and best:
            pairs = zip(typical[best], typical[mode], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
            speedup = sign_interval(ratios) if ratios else None
        count = sum(map(len, kept[mode]))
        rows.append(Row(gbit, mode, medians[mode], count, best if speedup else "", speedup))
    return rows


def render(rows: Sequence[Row]) -> str:
    lines = [f"{'gbit':>5} {'mode':<28}{'step ms':>9}{'steps':>7}  speed-up"]
    for row in rows:
        told = ""
        if row.speedup is not None:
            s = row.speedup
            told = f"{s.median:.3f} [{s.low:.3f}, {s.high:.3f}] over {row.against}"
        title, step = BY_NAME[row.mode].title, f"{row.step_us / 1e3:.1f}"
        lines.append(f"{row.gbit:>5g} {title:<28}{step:>9}{row.kept:>7}  {told}".rstrip())
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step over rate-limited sockets.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--gbit", type=numbers, default=(1.0, 2.0), help="rates of the link")
    parser.add_argument("--launches", type=int, default=6, help="6 give 95 %%")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each mode")
    parser.add_argument(
        "--modes", type=names, default=names(USUAL), help=",".join(m.name for m in MODES)
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    if (reason := netns.missing()) is not None:
        say(f"error: {reason}")
        return 2
    modes = tuple(mode.name for mode in args.modes)
    rows: list[Row] = []
    result: dict[str, object] = {**rounds.header("sockets.py"), "config": args.config}
    with netns.joined("sock") as network, tempfile.TemporaryDirectory() as folder:
        for gbit in args.gbit:
            netns.limit(network, gbit)
            launches: list[list[Measured]] = []
            for index in range(args.launches):
                request = Request(modes, args.config, gbit, args.steps, index, folder)
                try:
                    launches.append(launch(network, request))
                except LossesDiffer as error:
                    say(f"error: {error}")
                    return 1
                found = make_rows(gbit, modes, launches)
                say(f"[{gbit:g} gbit {index + 1}/{args.launches}]\n{render(found)}")
                result["rows"] = [asdict(row) for row in (*rows, *found)]
                result[f"{gbit:g} gbit"] = [[asdict(m) for m in ranks] for ranks in launches]
                if args.json:
                    rounds.write(args.json, result)
            rows += found
    print(f"config {args.config}, two ranks, gloo, {args.launches} launches\n\n{render(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
