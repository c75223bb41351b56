"""Time and memory of a training step on an emulated network, graphshard against FSDP2.

    python bench/step.py --config S --ranks 8 --gbit 0.8,1.6,3.2 --json OUT.json

One process stands for rank 0 of N; network and clock are emulated (bench/emulator), so a busy
machine disturbs little. Each launch of a mode is a fresh process; the modes take turns. One table
on stdout, progress on stderr. Exit status 1 if the losses of two modes differ by a bit: every
sharded mode must have those of FSDP2's default, and one process that of the first step (later
ones differ, because the emulated ranks all hold rank 0's shards).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, machine, table  # noqa: E402
from bench.launch import Measured, Request, StepTimes  # noqa: E402
from bench.models import CONFIGS  # noqa: E402
from bench.modes import MODES, REFERENCE, Mode  # noqa: E402


class LossesDiffer(Exception):
    """Two modes trained differently, so that their times say nothing."""


def launch(request: Request) -> Measured:
    """Run one launch in a process of its own. Raises RuntimeError with its output if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "KINETO_LOG_LEVEL": "99",  # the profiler's own notes on stderr
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.launch", json.dumps(asdict(request))],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"launch of {request.mode} failed:\n{done.stderr}")
    data = json.loads(done.stdout.splitlines()[-1])
    data["rates"] = [[StepTimes(**times) for times in steps] for steps in data["rates"]]
    return Measured(**data)


def check_losses(measured: dict[str, Measured], modes: Sequence[Mode]) -> None:
    """Raises LossesDiffer, naming the modes and the first step that differs."""
    if REFERENCE not in measured:
        return
    expected = measured[REFERENCE].losses
    for mode in modes:
        losses = measured[mode.name].losses
        count = len(expected) if mode.sharded else 1
        for step, (ours, theirs) in enumerate(zip(losses[:count], expected[:count], strict=True)):
            if not ours == theirs:  # NaN differs from everything
                raise LossesDiffer(
                    f"step {step}: {mode.name} has loss {ours!r}, {REFERENCE} {theirs!r}"
                )


def run_rounds(
    modes: Sequence[Mode], request: Request, num_launches: int
) -> Iterator[dict[str, Measured]]:
    """Each round launches every mode once; each begins with another one."""
    total = num_launches * len(modes)
    for index in range(num_launches):
        first = index % len(modes)
        measured: dict[str, Measured] = {}
        for mode in (*modes[first:], *modes[:first]):
            began = time.monotonic()
            measured[mode.name] = launch(replace(request, mode=mode.name))
            count = index * len(modes) + len(measured)
            steps = ", ".join(
                f"{table.step_median(measured[mode.name], i, 'step_us') / 1e3:.1f} ms"
                for i in range(len(request.gbits))
            )
            say(f"[{count:>3}/{total}] {mode.name}: {steps} ({time.monotonic() - began:.0f} s)")
        check_losses(measured, modes)
        yield measured


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step on an emulated network.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--gbit", type=numbers, default=(0.8, 1.6, 3.2), help="rates of the link")
    parser.add_argument("--alpha-us", type=float, default=300.0, help="latency of a collective")
    parser.add_argument("--launches", type=int, default=6, help="of each mode; 6 give 95 %%")
    parser.add_argument("--steps", type=int, default=6, help="measured steps at each rate")
    parser.add_argument("--modes", type=names, default=MODES, help=",".join(m.name for m in MODES))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def names(text: str) -> tuple[Mode, ...]:
    known = {mode.name: mode for mode in MODES}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(known[name] for name in text.split(","))


def write(path: Path, result: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    args = arguments()
    request = Request("", args.config, args.ranks, args.gbit, args.alpha_us, args.steps)
    emulator.load_extension()  # compiled once, here
    result: dict[str, object] = {
        "command": " ".join(("python bench/step.py", *sys.argv[1:])),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.describe(ROOT),
        "setting": {**asdict(request), "model": asdict(CONFIGS[args.config])},
    }
    rounds: list[dict[str, Measured]] = []
    rows: list[table.Row] = []
    load_averages = [os.getloadavg()]
    try:
        for measured in run_rounds(args.modes, request, args.launches):
            rounds.append(measured)
            load_averages.append(os.getloadavg())
            rows = table.make_rows(args.modes, args.gbit, rounds)
            result["load_averages"] = load_averages
            result["rows"] = [asdict(row) for row in rows]
            result["launches"] = [{name: asdict(m) for name, m in r.items()} for r in rounds]
            if args.json:  # after each round, so that an interrupted run leaves what it has
                write(args.json, result)
    except LossesDiffer as error:
        say(f"error: {error}")
        return 1
    print(
        f"config {args.config}: {next(iter(rounds[0].values())).num_params:,} parameters, "
        f"{CONFIGS[args.config].seq_len} tokens, {args.ranks} ranks (emulated), "
        f"{args.alpha_us:g} us a collective, {len(rounds)} launches of each mode, virtual clock\n"
    )
    print(table.render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
