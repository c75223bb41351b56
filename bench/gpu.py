"""Tokens a second on one CUDA device: graphshard against torch.compile without FSDP, and FSDP2.

    python bench/gpu.py --json OUT.json
    python bench/gpu.py --ranks 8 --json OUT.json

A Llama-style model of 1.06 B parameters in bf16, AdamW. One rank, with NCCL: what sharding costs
where there is nothing to shard, against plain torch.compile of the whole model. More ranks: all but
this one are emulated, and each collective occupies a stream for as long as the network of a preset
takes (`bench/gpu_network.py`); against FSDP2 with its blocks compiled. Peaks are in the table.
Each launch is a fresh process; the ways take turns.
`--smoke` runs a tiny model on the CPU with gloo, whose numbers say nothing. One table on stdout,
progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.gpu_launch import CONFIGS, Expected, Measured, Request  # noqa: E402
from bench.interval import Comparison, compare, sign_interval, verdict  # noqa: E402
from bench.rounds import say  # noqa: E402
from bench.ways import Way, choose, usable  # noqa: E402

MODES = "inductor,fsdp2_blocks,graphshard_aten,graphshard,graphshard_cudagraphs"
EMULATED = "fsdp2_blocks,graphshard"
NETWORK = "h100"
# With what graphshard is compared, and how much of its step time it may take.
ALONE, MANY = ("inductor", 1.03), ("fsdp2_blocks", 1 / 1.10)
OFFLOADED = ("fsdp2_blocks", 1.0)
CUDA_ONLY = ("graphshard_cudagraphs",)

Round = Mapping[str, Measured]  # name of the way -> what it measured


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over launches of medians over steps. loss: of the last step, of the last launch.
    expected: of forward and backward, by graphshard's plan."""

    way: str
    title: str
    tokens_per_s: float
    step_us: float
    host_us: float
    first_s: float
    peak_bytes: int
    loss: float
    grads_us: float
    expected: Expected | None


def make_row(way: Way, measured: Sequence[Round], tokens: int) -> Row:
    mine = [each[way.name] for each in measured]
    step_us = median(median(m.step_us) for m in mine)
    return Row(
        way.name, way.title,
        tokens_per_s=1e6 * tokens / step_us,
        step_us=step_us,
        host_us=median(median(m.host_us) for m in mine),
        first_s=median(m.first_s for m in mine),
        peak_bytes=max(m.peak_bytes for m in mine),
        loss=mine[-1].losses[-1],
        grads_us=median(median(m.grads_us) for m in mine),
        expected=mine[-1].expected,
    )  # fmt: skip


def comparisons(
    ways: Sequence[Way],
    measured: Sequence[Round],
    base: tuple[str, float] = ALONE,
    times_of: Callable[[Measured], Sequence[float]] = attrgetter("step_us"),
) -> list[Comparison]:
    """Paired ratios of times to those of `base`, which come from the same round."""
    peer, target = base
    return [
        compare(
            way.name, peer, target,
            [tuple(median(times_of(each[name])) for name in (way.name, peer)) for each in measured],
        )
        for way in ways if way.sharding and way.name != peer and peer in measured[0]
    ]  # fmt: skip


HEADER = (
    f"{'way':<28}{'tokens/s':>12}{'step ms':>10}{'host ms':>10}{'first s':>9}{'peak GiB':>10}"
    f"{'loss':>9}{'grads ms':>10}{'expected':>20}"
)
FOOTER = (
    "\ngrads: forward and backward; expected: of them, by the plan's costs.\n"
    "host: until the step was issued, at most (the queue of kernels is finite).\n"
    "Medians of launches; ratios of step times: paired, order statistics, sign-based, {:.1f} %."
)


def render(rows: Sequence[Row], compared: Sequence[Comparison], num_launches: int) -> str:
    lines = [HEADER, *(line_of(row) for row in rows), "", *(verdict(c) for c in compared)]
    coverage = 100 * sign_interval([0.0] * num_launches).coverage
    return "\n".join([*lines, FOOTER.format(coverage)])


def line_of(row: Row) -> str:
    told = row.expected
    told_text = f"{told.grads_us / 1e3:.2f} ms, {told.peak_bytes / 2**30:.1f} GiB" if told else ""
    return (
        f"{row.title:<28}{row.tokens_per_s:>12,.0f}{row.step_us / 1e3:>10.2f}"
        f"{row.host_us / 1e3:>10.2f}{row.first_s:>9.1f}{row.peak_bytes / 2**30:>10.1f}"
        f"{row.loss:>9.4f}{row.grads_us / 1e3:>10.2f}{told_text:>20}"
    )


def launch(request: Request, cache: Mapping[str, str]) -> Measured:
    """One launch. Raises RuntimeError if it fails."""
    stdout = rounds.python("-m", "bench.gpu_launch", json.dumps(asdict(request)), environment=cache)
    data: Any = rounds.last_line(stdout)
    told = data.pop("expected")
    return Measured(**data, expected=told and Expected(**told))


def measure(args: argparse.Namespace, ways: Sequence[Way]) -> str:
    """All rounds; the table. The file is written after each. All launches share one cache."""
    config = CONFIGS[args.config]
    result: dict[str, object] = {
        **rounds.header("gpu.py"),
        "model": asdict(config),
        **network_of(args),
    }
    found: list[dict[str, Measured]] = []
    loads = [os.getloadavg()]
    table = ""
    with rounds.inductor_cache(own=not args.smoke) as cache:
        for index in range(args.launches):
            measured: dict[str, Measured] = {}
            for way in rounds.turns(ways, index):
                began = time.monotonic()
                request = Request(
                    way.name, args.config, args.device, args.steps, args.warm_up,
                    args.ranks, args.network, offloads=args.offload,
                )  # fmt: skip
                measured[way.name] = launch(request, cache)
                say(
                    f"[round {index + 1} of {args.launches}] {way.name}: "
                    f"{median(measured[way.name].step_us) / 1e3:.1f} ms "
                    f"({time.monotonic() - began:.0f} s)"
                )
            found.append(measured)
            loads.append(os.getloadavg())
            rows = [make_row(way, found, config.batch * config.seq_len) for way in ways]
            # The host's optimizer takes longer than all else, and the same for all ways.
            times = attrgetter("grads_us" if args.offload else "step_us")
            base = OFFLOADED if args.offload else ALONE if args.ranks == 1 else MANY
            compared = comparisons(ways, found, base, times)
            table = render(rows, compared, len(found))
            result["load_averages"] = loads
            result["device"] = measured[ways[0].name].device_name
            result["rows"] = [asdict(row) for row in rows]
            result["ratios"] = [{**asdict(c), "met": c.met} for c in compared]
            result["launches"] = [{name: asdict(m) for name, m in r.items()} for r in found]
            if args.json:
                rounds.write(args.json, result)
    return table


def network_of(args: argparse.Namespace) -> dict[str, object]:
    return {"ranks": args.ranks, "network": args.network or "none", "offload": args.offload}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second on one CUDA device.")
    parser.add_argument("--launches", type=int, default=6, help="of each way; 6 give 95 %%")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a launch")
    parser.add_argument("--modes", type=choose, help=f"one rank: {MODES}; more: {EMULATED}")
    parser.add_argument("--ranks", type=int, default=1, help="more than one are emulated")
    parser.add_argument("--network", default=NETWORK, help="preset whose network is emulated")
    parser.add_argument("--offload", action="store_true", help="shards on the host; ratios: grads")
    parser.add_argument("--smoke", action="store_true", help="one launch of a tiny model, CPU")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    args.config, args.device, args.warm_up = "1B", "cuda", 5
    if args.smoke:
        args.config, args.device, args.warm_up = "tiny", "cpu", 1
        args.launches, args.steps = 1, 2
    if args.ranks == 1:
        args.network = ""
    args.modes = args.modes or choose(EMULATED if args.ranks > 1 or args.offload else MODES)
    return args


def main() -> int:
    import torch

    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        say("error: no CUDA device; --smoke runs a tiny model on the CPU")
        return 1
    ways = usable(way for way in args.modes if args.device == "cuda" or way.name not in CUDA_ONLY)
    table = measure(args, ways)
    config = CONFIGS[args.config]
    print(
        f"{args.device}, {config.batch} sequences of {config.seq_len} tokens, bf16, "
        f"{args.ranks} ranks{f', network of {args.network}' if args.network else ''}, "
        f"{args.launches} launches of each way\n"
    )
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
