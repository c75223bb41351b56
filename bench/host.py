"""Host time of a training step that sharding adds: graphshard against FSDP2 and SimpleFSDP.

    python bench/host.py --params 200,1000 --json OUT.json

The step (forward, backward, gradients dropped; no optimizer) of a model of many tiny groups: five
Linear(8, 8) with bias each, so next to no compute. Host time is the step less the same step in one
process, eager and without sharding, in the same round of launches; that is subtracted from
compiled ways too, so compiling can make up for some or all of it, and host time below zero means
that all of it was. The clock is virtual (CPU time of one thread), and the emulated link costs
nothing. SimpleFSDP runs as one graph by Inductor, whose overlap passes are off, as by default. Each
launch is a fresh process; the ways take turns. One table on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, peers, rounds  # noqa: E402
from bench.host_launch import PARAMS_PER_GROUP, Measured, Request, StepTimes  # noqa: E402
from bench.interval import Comparison, compare, sign_interval, verdict  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.ways import Way, choose, usable  # noqa: E402

MODES = "single,inductor,fsdp2,simple_fsdp,graphshard_aten,graphshard"
BASE, COMPILED_BASE = "single", "inductor"  # without sharding
TARGETS = (("fsdp2", 0.4), ("simple_fsdp", 0.7))  # of the peers' host time, at most
SMOKE = Request("", num_params=20, num_ranks=4, num_steps=3, num_warm_up=1)
EXPOSED_LIMIT = 1e-3  # part of a step that may be waiting on a link that costs nothing

Round = Mapping[str, Measured]  # name of the way -> what it measured


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one number of parameters. Times are medians over launches of medians over steps.

    host_us: paired, over the eager single process; over_compiled_us: over the one that Inductor
    compiled. None: that way was not launched, or is not sharded. host_low_us, host_high_us: the
    interval of host_us.
    """

    way: str
    title: str
    num_params: int
    step_us: float
    forward_us: float
    exposed_us: float
    host_us: float | None
    host_low_us: float | None
    host_high_us: float | None
    over_compiled_us: float | None


def typical_us(measured: Measured, name: str = "step_us") -> float:
    return float(median(getattr(step, name) for step in measured.steps))


def host_us(measured: Round, way: str, base: str = BASE) -> float:
    """What the way's step takes longer than that of `base` in the same round."""
    return typical_us(measured[way]) - typical_us(measured[base])


def make_row(way: Way, num_params: int, measured: Sequence[Round]) -> Row:
    def over(base: str) -> list[float]:
        known = way.sharding and base in measured[0]
        return [host_us(each, way.name, base) for each in measured] if known else []

    def typical(name: str) -> float:
        return median(typical_us(each[way.name], name) for each in measured)

    host = sign_interval(over(BASE)) if over(BASE) else None
    compiled = over(COMPILED_BASE)
    return Row(
        way.name, way.title, num_params,
        typical("step_us"), typical("forward_us"), typical("exposed_us"),
        host and host.median, host and host.low, host and host.high,
        median(compiled) if compiled else None,
    )  # fmt: skip


def comparisons(ways: Sequence[Way], measured: Sequence[Round]) -> list[Comparison]:
    """Paired ratios of host time, of graphshard's ways to their peers."""
    names = [way.name for way in ways]
    if BASE not in names:
        return []
    return [
        compare(
            ours.name, peer, target,
            [(host_us(each, ours.name), host_us(each, peer)) for each in measured],
        )
        for ours in ways if ours.compiler == "graphshard"
        for peer, target in TARGETS if peer in names
    ]  # fmt: skip


# -- the table -----------------------------------------------------------------------------------

HEADER = (
    f"{'params':>6}  {'way':<24}{'step ms':>9}{'forward':>9}{'host ms':>9}"
    f"  {'interval':<18}{'over Inductor':>14}"
)
FOOTER = (
    "\nstep: forward, backward, gradients dropped; host: step less that of one eager process;\n"
    "over Inductor: less that of one process compiled by Inductor. Medians of launches; intervals\n"
    "and ratios: paired, order statistics, sign-based, {coverage:.1f} %.{notes}"
)


def render(rows: Sequence[Row], compared: Mapping[int, Sequence[Comparison]]) -> str:
    lines = [HEADER]
    for num_params, ratios in compared.items():
        lines += [line_of(row) for row in rows if row.num_params == num_params]
        lines += [f"{'':>8}{verdict(ratio)}" for ratio in ratios] + [""]
    return "\n".join(lines)


def line_of(row: Row) -> str:
    interval = ""
    if row.host_low_us is not None and row.host_high_us is not None:
        interval = f"[{row.host_low_us / 1e3:.2f}, {row.host_high_us / 1e3:.2f}]"
    return (
        f"{row.num_params:>6}  {row.title:<24}{ms(row.step_us):>9}{ms(row.forward_us):>9}"
        f"{ms(row.host_us):>9}  {interval:<18}{ms(row.over_compiled_us):>14}"
    ).rstrip()


def ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.2f}"


def notes(rows: Sequence[Row]) -> str:
    """What would make the numbers mean something else."""
    waiting = [r.title for r in rows if r.exposed_us > EXPOSED_LIMIT * r.step_us]
    below = [r.title for r in rows if r.host_us is not None and r.host_us < 0]
    found = ""
    if waiting:
        found += f"\nWaits for the link are in the steps of: {', '.join(sorted(set(waiting)))}."
    if below:
        found += f"\nFaster than one eager process without sharding: {', '.join(below)}."
    return found


# -- launches ------------------------------------------------------------------------------------


def launch(request: Request, cache: Mapping[str, str]) -> Measured:
    """One launch. Raises RuntimeError if it fails."""
    stdout = rounds.python(
        "-m", "bench.host_launch", json.dumps(asdict(request)), environment=cache
    )
    data: Any = rounds.last_line(stdout)
    return Measured(**{**data, "steps": [StepTimes(**step) for step in data["steps"]]})


def run_round(
    ways: Sequence[Way], request: Request, index: int, cache: Mapping[str, str]
) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    for way in rounds.turns(ways, index):
        began = time.monotonic()
        named = Request(**{**asdict(request), "way": way.name})
        measured[way.name] = launch(named, cache)
        say(
            f"[round {index + 1}, {request.num_params} parameters] {way.name}: "
            f"{ms(typical_us(measured[way.name]))} ms ({time.monotonic() - began:.0f} s)"
        )
    return measured


def measure(args: argparse.Namespace, ways: Sequence[Way], request: Request) -> str:
    """All rounds; the table. The file is written after each round.

    Compiling is not measured here, so all launches share one new cache of Inductor's.
    """
    result: dict[str, object] = {**rounds.header("host.py"), "setting": asdict(request)}
    found: dict[int, list[Round]] = {num_params: [] for num_params in args.params}
    loads = [os.getloadavg()]
    rows: list[Row] = []
    compared: dict[int, list[Comparison]] = {}
    with rounds.inductor_cache(own=not args.smoke) as cache:
        for index in range(args.launches):
            for num_params in args.params:
                sized = Request(**{**asdict(request), "num_params": num_params})
                found[num_params].append(run_round(ways, sized, index, cache))
            loads.append(os.getloadavg())
            rows = [make_row(w, n, each) for n, each in found.items() for w in ways]
            compared = {n: comparisons(ways, each) for n, each in found.items()}
            result["load_averages"] = loads
            result["rows"] = [asdict(row) for row in rows]
            result["ratios"] = {
                n: [{**asdict(c), "met": c.met} for c in each] for n, each in compared.items()
            }
            result["launches"] = {
                n: [{name: asdict(m) for name, m in r.items()} for r in each]
                for n, each in found.items()
            }
            if args.json:
                rounds.write(args.json, result)
    coverage = 100 * sign_interval([0.0] * args.launches).coverage
    return render(rows, compared) + FOOTER.format(coverage=coverage, notes=notes(rows))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Host time of a step that sharding adds.")
    parser.add_argument("--params", type=rounds.numbers, default=(200, 1000), help="parameters")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that one process stands for")
    parser.add_argument("--launches", type=int, default=6, help="of each way; 6 give 95 %%")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of a launch")
    parser.add_argument("--modes", type=choose, default=choose(MODES), help=MODES)
    parser.add_argument("--smoke", action="store_true", help="one short launch of a tiny model")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    if any(number % PARAMS_PER_GROUP for number in args.params):
        parser.error(f"--params: a group has {PARAMS_PER_GROUP} parameters")
    if args.smoke:
        args.params, args.launches = (SMOKE.num_params,), 1
    return args


def main() -> int:
    args = arguments()
    try:
        ways = usable(args.modes)
    except peers.PeerMissing as error:
        say(f"error: {error}")
        return 1
    emulator.load_extension()  # compiled once, here
    request = SMOKE if args.smoke else Request("", 0, args.ranks, args.steps, num_warm_up=5)
    table = measure(args, ways, request)
    print(
        f"{request.num_ranks} ranks (emulated, the link costs nothing), {args.launches} launches "
        f"of each way, virtual clock\n"
    )
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
