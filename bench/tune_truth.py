"""All settings of a small model really run on an emulated network, beside what tune says of them.

    python bench/tune_truth.py --config S --gbit 0.8 --json bench/results/tune_truth.json

Two nodes of four ranks. Each setting (mesh, groups, resharding, what is computed again, size of a
micro-step) is launched as the code that `graphshard tune` writes for it; the step has the same
tokens in all of them. One table on stdout: predicted and measured time of each, in the order of the
measured ones; then which one tune chooses, and how far it is from the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import kendalltau
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import emulator, profile  # noqa: E402
from bench.models import CONFIGS, Llama, WithLoss  # noqa: E402
from bench.rounds import header, last_line, python, say, turns, write  # noqa: E402
from bench.tune_launch import Measured, Request  # noqa: E402
from graphshard.offline.api import machine_of  # noqa: E402
from graphshard.offline.target import Sizes, made_of  # noqa: E402
from graphshard.offline.world import Made  # noqa: E402
from graphshard.schedule.setting import (  # noqa: E402
    Checkpointing,
    Grouping,
    Resharding,
    Setting,
)
from graphshard.tune.code import code_of  # noqa: E402
from graphshard.tune.pricing import Pricer  # noqa: E402
from graphshard.tune.search import Asked, Space, found_for, space_of  # noqa: E402
from graphshard.tune.subject import Machines, Subject  # noqa: E402
from graphshard.view.tune import CHECKPOINTS, GROUPS, RESHARDS, mesh_text  # noqa: E402

RANKS, PER_NODE = 8, 4
APART = 0.05  # launches of one setting differ by as much
GROUPINGS = (Grouping.AS_IS, Grouping.PAIRS, Grouping.QUADS, Grouping.WHOLE)


@dataclass(frozen=True, slots=True)
class Row:
    """predicted_us, model_us: of forwards and backwards; medians. step_us: with the optimizer.
    launches_us: model_us of each launch alone."""

    setting: Setting
    predicted_us: float
    predicted_peak_bytes: int
    step_us: float
    model_us: float
    launches_us: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted_us / self.model_us - 1


def subject_of(args: argparse.Namespace, machine: str) -> Subject:
    config = CONFIGS[args.config]

    def build(sizes: Sizes) -> Made:
        model = WithLoss(Llama(config))
        for block in model.model.layers:
            fully_shard(block, mp_policy=MixedPrecisionPolicy())
        fully_shard(model, mp_policy=MixedPrecisionPolicy())
        shape = (dict(sizes)["batch"], config.seq_len)
        tokens, targets = torch.zeros(2, *shape, dtype=torch.int64)
        return made_of("model", (model, (tokens, targets)))

    batches = [(("batch", batch), ("seq", config.seq_len)) for batch in args.batches]
    machines = Machines(machine_of(machine), PER_NODE, args.compute == "inductor")
    subject = Subject("model", build, machines, (RANKS,), tuple(batches), say)
    subject.prepare()
    return subject


def space_for(args: argparse.Namespace, subject: Subject) -> Space:
    """All of it is run."""
    tokens = RANKS * max(args.batches) * CONFIGS[args.config].seq_len
    asked = Asked(int(1e6 * args.budget_mb), subject.sizes, tokens)
    space = space_of(subject, RANKS, asked)
    assert subject.groupings is not None
    return replace(
        space,
        groupings=tuple(kind for kind in GROUPINGS if kind in subject.groupings.calls),
        reshards=tuple(Resharding(word) for word in args.reshards),
        checkpointings=tuple(Checkpointing(word) for word in args.checkpoints),
    )


def launches(
    args: argparse.Namespace, subject: Subject, settings: Sequence[Setting], machine: str
) -> Iterator[dict[Setting, Measured]]:
    """Each round launches every setting once; each begins with another one."""
    model = subject.bare()
    folder = Path(machine).parent
    for index in range(args.launches):
        found: dict[Setting, Measured] = {}
        for place, setting in enumerate(turns(settings, index)):
            path = folder / "setting.py"
            path.write_text(code_of(subject, model, setting))
            request = Request(
                str(path), machine, args.config, RANKS, PER_NODE, args.inside, args.gbit,
                args.alpha_us, args.compute, args.steps, profile.pace_in(folder, args.compute),
            )  # fmt: skip
            data: Any = last_line(python("-m", "bench.tune_launch", json.dumps(asdict(request))))
            found[setting] = Measured(**{key: tuple(value) for key, value in data.items()})
            step_us = median(found[setting].steps_us)
            say(f"[{place + 1:>3}/{len(settings)}] {words(setting)}: {step_us / 1e3:.1f} ms")
        yield found


def words(setting: Setting) -> str:
    cells = (
        f"{mesh_text(setting):<11}",
        f"{GROUPS[setting.grouping]:<15}",
        f"{RESHARDS[setting.reshard]:<12}",
        f"{CHECKPOINTS[setting.checkpointing]:<11}",
        f"{dict(setting.sizes)['batch']} x {setting.micro_steps}"
        f"{'' if setting.sync_each else ', sync last'}",
    )
    return " ".join(cells)


def rows_of(pricer: Pricer, rounds: Sequence[dict[Setting, Measured]]) -> list[Row]:
    rows = []
    for setting in rounds[0]:
        priced = pricer.price(setting)
        steps = [time for found in rounds for time in found[setting].steps_us]
        alone = [time for found in rounds for time in found[setting].model_us]
        launches_us = tuple(median(found[setting].model_us) for found in rounds)
        predicted = priced.passes_us, priced.peak_bytes
        rows.append(Row(setting, *predicted, median(steps), median(alone), launches_us))
    return sorted(rows, key=lambda row: row.model_us)


def is_apart(faster: Row, slower: Row) -> bool:
    return slower.model_us > (1 + APART) * faster.model_us


def render(rows: Sequence[Row], chosen: Setting) -> str:
    lines = [f"{'forward and backward':<60}{'predicted':>12}{'measured':>12}{'error':>9}"]
    for row in rows:
        times = f"{row.predicted_us / 1e3:>9.1f} ms{row.model_us / 1e3:>9.1f} ms"
        mark = "  chosen" if row.setting == chosen else ""
        lines.append(f"{words(row.setting):<60}{times}{row.error:>+9.1%}{mark}")
    own = next(row for row in rows if row.setting == chosen)
    behind = own.model_us / rows[0].model_us - 1
    errors = [abs(row.error) for row in rows]
    order = kendalltau([row.predicted_us for row in rows], [row.model_us for row in rows])
    lines += ["", f"chosen: {behind:.1%} behind the fastest of {len(rows)}"]
    lines.append(f"error: {sum(errors) / len(errors):.1%} in the mean, at most {max(errors):.1%}")
    pairs = [(one, other) for one, other in combinations(rows, 2) if is_apart(one, other)]
    ordered = sum(one.predicted_us < other.predicted_us for one, other in pairs)
    lines.append(
        f"order: {ordered} of {len(pairs)} pairs more than {APART:.0%} apart; "
        f"Kendall's tau {order.statistic:.2f}"
    )
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description="Tuning against all settings really run.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--gbit", type=float, default=0.8, help="rate of the link between nodes")
    parser.add_argument("--inside", type=float, default=10.0, help="times --gbit inside a node")
    parser.add_argument("--alpha-us", type=float, default=300.0, help="latency of a collective")
    parser.add_argument("--budget-mb", type=float, default=1e5, help="1e6 bytes")
    parser.add_argument("--batches", type=lambda text: [*map(int, text.split(","))], default=[1, 2])
    parser.add_argument("--reshards", type=names, default=("open", "always"))
    parser.add_argument("--checkpoints", type=names, default=("auto", "full"))
    parser.add_argument("--compute", choices=("aten", "inductor"), default="inductor")
    parser.add_argument("--launches", type=int, default=3, help="of each setting")
    parser.add_argument("--steps", type=int, default=6, help="measured in each launch")
    parser.add_argument("--limit", type=int, help="only so many settings, for a smoke run")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    emulator.load_extension()  # compiled once, here
    with tempfile.TemporaryDirectory() as folder:
        say("calibrating compute")
        steps = str(args.launches * args.steps)
        say(python("-m", "bench.profile", folder, args.config, str(RANKS), steps).strip())
        nodes = emulator.Nodes(PER_NODE, args.inside)
        compute = profile.path_in(Path(folder), args.compute)
        machine = profile.write(
            Path(folder), compute, num_ranks=RANKS, gbit=args.gbit, alpha_us=args.alpha_us,
            nodes=nodes,
        )  # fmt: skip
        subject = subject_of(args, str(machine))
        space, pricer = space_for(args, subject), Pricer(subject)
        settings = [s for s in space.settings() if pricer.price(s).plan is not None][: args.limit]
        best = found_for(subject, Pricer(subject), space, None).best
        assert best is not None
        chosen = best.setting
        settings += [chosen] if chosen not in settings else []
        result: dict[str, object] = {
            **header("tune_truth.py"),
            "setting": {**vars(args), "json": None, "model": asdict(CONFIGS[args.config])},
            "compute": json.loads(compute.read_text()),
            "chosen": asdict(chosen),
        }
        rounds: list[dict[Setting, Measured]] = []
        load_averages = [os.getloadavg()]
        rows: list[Row] = []
        for found in launches(args, subject, settings, str(machine)):
            rounds.append(found)
            load_averages.append(os.getloadavg())
            rows = rows_of(pricer, rounds)
            result |= {"rows": [asdict(row) for row in rows], "load_averages": load_averages}
            result["launches"] = [[asdict(one[s]) for s in rounds[0]] for one in rounds]
            if args.json:
                write(args.json, result)
    print(render(rows, chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
