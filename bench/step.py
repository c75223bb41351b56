"""Time and memory of a training step on an emulated network, graphshard against FSDP2.

    python bench/step.py --config S --ranks 8 --gbit 0.8,1.6,3.2 --json OUT.json

One process stands for rank 0 of N; network and clock are emulated (bench/emulator), so a busy
machine disturbs little. Each launch of a mode is a fresh process; the modes take turns. One table
on stdout, progress on stderr. Exit status 1 if the losses of two modes differ: by a bit from those
of FSDP2 where ops run one by one, by more than TOLERANCE where Inductor computes. Of one process
only the first step counts (later ones differ, because the emulated ranks all hold rank 0's shards).

A budget is the measured peak of another mode, so that both are compared at the same memory, or, for
all modes that have one, what --budget-mb says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, limits, table  # noqa: E402
from bench.launch import Measured, Rate, Request, StepTimes  # noqa: E402
from bench.models import CONFIGS  # noqa: E402
from bench.modes import (  # noqa: E402
    ANY,
    BY_NAME,
    MODES,
    NO_LIMIT_BYTES,
    SWEPT,
    TUNING_STEPS,
    WARM_UP_STEPS,
    Mode,
)
from bench.rounds import header, last_line, python, say, turns, write  # noqa: E402

USUAL = (
    "inductor,fsdp2_tuned,fsdp2_tuned_half,fsdp2_tuned_keep,"
    "blocks_tuned,blocks_tuned_half,blocks_tuned_keep,simple_fsdp_4mb,"
    "fused,fused_low,fused_middle,fused_high"
)
TOLERANCE = 1e-3  # of a loss, after a few steps of AdamW


class LossesDiffer(Exception):
    """Two modes trained differently, so that their times say nothing."""


def launch(request: Request) -> Measured:
    """One launch. Raises RuntimeError if it fails."""
    data: Any = last_line(python("-m", "bench.launch", json.dumps(asdict(request))))
    rates = [
        Rate(**{**rate, "steps": [StepTimes(**times) for times in rate["steps"]]})
        for rate in data["rates"]
    ]
    return Measured(**{**data, "rates": rates})


def check_losses(measured: dict[str, Measured], modes: Sequence[Mode]) -> None:
    """Raises LossesDiffer, naming the modes and the first step that differs."""
    sharded = [mode.name for mode in modes if mode.sharding]
    if not sharded:
        return
    reference = next((name for name in sharded if BY_NAME[name].is_exact), sharded[0])
    expected = measured[reference].losses
    for mode in modes:
        losses = measured[mode.name].losses
        count = len(expected) if mode.sharding else 1
        for step, (ours, theirs) in enumerate(zip(losses[:count], expected[:count], strict=True)):
            exact = mode.is_exact and BY_NAME[reference].is_exact
            within = 0.0 if exact else TOLERANCE * abs(theirs)
            if not abs(ours - theirs) <= within:  # NaN differs from everything
                raise LossesDiffer(
                    f"step {step}: {mode.name} has loss {ours!r}, {reference} {theirs!r}"
                )


def budgets(
    modes: Sequence[Mode], request: Request, budget_mb: float | None = None
) -> dict[str, int | None]:
    """Of each mode that is planned: the peak of others, each shown by one short launch, or what is
    given."""
    if budget_mb is not None:
        return {mode.name: int(1e6 * budget_mb) if mode.within else None for mode in modes}
    peaks = dict.fromkeys(ANY, NO_LIMIT_BYTES)
    for name in dict.fromkeys(name for mode in modes for name in mode.within):
        if name not in peaks:
            short = replace(request, mode=name, gbits=request.gbits[:1], num_steps=1)
            peaks[name] = launch(short).rates[0].peak_bytes
            say(f"peak of {name}: {peaks[name]:,} bytes")
    return {
        mode.name: int(mean(peaks[name] for name in mode.within)) if mode.within else None
        for mode in modes
    }


def run_rounds(
    modes: Sequence[Mode],
    request: Request,
    num_launches: int,
    within: Mapping[str, int | None],
) -> Iterator[dict[str, Measured]]:
    """Each round launches every mode once; each begins with another one."""
    total = num_launches * len(modes)
    for index in range(num_launches):
        measured: dict[str, Measured] = {}
        for mode in turns(modes, index):
            began = time.monotonic()
            measured[mode.name] = launch(
                replace(request, mode=mode.name, budget_bytes=within[mode.name])
            )
            count = index * len(modes) + len(measured)
            steps = ", ".join(
                f"{table.step_median(rate, 'step_us') / 1e3:.1f} ms"
                for rate in measured[mode.name].rates
            )
            say(f"[{count:>3}/{total}] {mode.name}: {steps} ({time.monotonic() - began:.0f} s)")
        check_losses(measured, modes)
        yield measured


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step on an emulated network.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--gbit", type=numbers, default=(0.8, 1.6, 3.2), help="rates of the link")
    parser.add_argument("--alpha-us", type=float, default=300.0, help="latency of a collective")
    parser.add_argument("--ranks-per-node", type=int, default=0, help="0: all on one node")
    parser.add_argument("--inside", type=float, default=10.0, help="times --gbit inside a node")
    parser.add_argument("--budget-mb", type=float, help="of modes with a budget, 1e6 bytes")
    parser.add_argument("--micro-steps", type=int, default=1, help="of each optimizer step")
    parser.add_argument("--launches", type=int, default=6, help="of each mode; 6 give 95 %%")
    parser.add_argument("--steps", type=int, default=6, help="measured steps at each rate")
    parser.add_argument(
        "--modes",
        type=names,
        default=names(USUAL),
        help=f"{','.join(m.name for m in MODES)}; swept: all settings of FSDP2 and SimpleFSDP",
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def names(text: str) -> tuple[Mode, ...]:
    text = text.replace("swept", ",".join(mode.name for mode in SWEPT))
    unknown = [name for name in text.split(",") if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(BY_NAME[name] for name in text.split(","))


def main() -> int:
    args = arguments()
    request = Request(
        "", args.config, args.ranks, args.gbit, args.alpha_us, args.steps,
        micro_steps=args.micro_steps, ranks_per_node=args.ranks_per_node, inside=args.inside,
        warm_up=TUNING_STEPS if any(mode.tunes for mode in args.modes) else WARM_UP_STEPS,
    )  # fmt: skip
    emulator.load_extension()  # compiled once, here
    with tempfile.TemporaryDirectory() as folder:
        if any(mode.within for mode in args.modes):
            say("calibrating compute")
            request = replace(request, compute=folder)
            said = python("-m", "bench.profile", request.compute, args.config, str(args.ranks))
            say(said.strip())
        try:
            rows, near = measure(args, request)
        except LossesDiffer as error:
            say(f"error: {error}")
            return 1
    print(
        f"config {args.config}: {CONFIGS[args.config].seq_len} tokens, {args.micro_steps} "
        f"micro-step{'s' * (args.micro_steps > 1)}, {args.ranks} ranks {_nodes_text(args)}"
        f"(emulated), {args.alpha_us:g} us a collective, {args.launches} launches of each mode, "
        "virtual clock\n"
    )
    print(table.render(rows))
    if near:
        print(f"\n{limits.render(near)}")
    return 0


def _nodes_text(args: argparse.Namespace) -> str:
    if not args.ranks_per_node:
        return ""
    return f"on nodes of {args.ranks_per_node}, {args.inside:g} times faster inside "


def measure(
    args: argparse.Namespace, request: Request
) -> tuple[list[table.Row], list[limits.Limit]]:
    """All rounds. The file is written after each: an interrupted run leaves what it has."""
    result: dict[str, object] = {
        **header("step.py"),
        "setting": {**asdict(replace(request, compute="")), "model": asdict(CONFIGS[args.config])},
        "compute": {
            path.stem: json.loads(path.read_text())
            for path in (Path(request.compute).glob("*.json") if request.compute else ())
        },
    }
    within = budgets(args.modes, request, args.budget_mb)
    rounds: list[dict[str, Measured]] = []
    rows: list[table.Row] = []
    near: list[limits.Limit] = []
    load_averages = [os.getloadavg()]
    for measured in run_rounds(args.modes, request, args.launches, within):
        rounds.append(measured)
        load_averages.append(os.getloadavg())
        rows = table.make_rows(args.modes, args.gbit, rounds, within)
        near = limits.make_limits(args.modes, args.gbit, rounds)
        result["budget_bytes"] = within
        result["load_averages"] = load_averages
        result["rows"] = [asdict(row) for row in rows]
        result["limits"] = [asdict(limit) for limit in near]
        result["launches"] = [{name: asdict(m) for name, m in r.items()} for r in rounds]
        if args.json:
            write(args.json, result)
    return rows, near


if __name__ == "__main__":
    sys.exit(main())
