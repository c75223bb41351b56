"""Is the model true? Predicted against measured steps of three schedules on a slow real network.

    sudo python bench/truth.py --gbit 0.5,1,2 --json OUT.json

Two ranks in network namespaces, joined by a link of each rate in turn. At each rate the cost model
is calibrated first. Then three models with equal weights take turns, step by step: eager FSDP2 as
it is, eager FSDP2 with explicit prefetch, and graphshard with the planner's schedule, which is
planned again from times of its own first steps. A step is forward (loss included) and backward. On
a CPU, eager FSDP2 waits for every collective that it was not told to issue asynchronously; its two
predictions are simulations of just that, with the same costs as the planner's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from bench import machine, netns  # noqa: E402
from bench.models import CONFIGS, Config, Llama, WithLoss, make_batch  # noqa: E402
from graphshard.calibrate.calibrate import calibrate  # noqa: E402
from graphshard.capture.root_state import root_states_under  # noqa: E402
from graphshard.planner.fsdp2 import cpu_placement  # noqa: E402
from graphshard.planner.plan_step import fsdp2  # noqa: E402
from graphshard.planner.problem import Problem  # noqa: E402

REPLAN_AFTER = 6
PREFETCHED = 1
SCHEDULES = ("fsdp2", "fsdp2_prefetch", "graphshard")
HEADER = f"{'gbit':>5} {'schedule':<18}{'predicted ms':>14}{'measured ms':>13}{'error':>9}"


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule at one rate; `measured_us` is the median over steps of the slower rank."""

    gbit: float
    schedule: str
    predicted_us: float
    measured_us: float
    steps_us: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


def build(config: Config) -> Any:
    torch.manual_seed(0)
    whole = WithLoss(Llama(config))
    for layer in whole.model.layers:
        fully_shard(layer)
    return fully_shard(whole)


def prefetching(whole: Any) -> Any:
    """Explicit prefetch as FSDP2's tutorial does it, and gathers that a CPU does not wait for."""
    whole._set_unshard_async_op(True)
    chain = list(whole.model.layers)
    for i, layer in enumerate(chain):
        layer.set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + PREFETCHED])
        layer.set_modules_to_backward_prefetch(chain[max(0, i - PREFETCHED) : i][::-1])
    return whole


# -- one rank ------------------------------------------------------------------------------------


def work(config: Config, num_steps: int, folder: Path) -> dict[str, Any]:
    """What one rank does at one rate. Returns predicted times, and measured ones by schedule."""
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    profile = folder / f"profile{dist.get_rank()}.json"
    profile.write_text(calibrate({"world": world}, torch.device("cpu")).to_json())
    options = {
        "fallback": "error",
        "memory_budget": "1000GiB",
        "machine": str(profile),
        "replan_after": REPLAN_AFTER,
        "compute": "aten",
    }
    models = {
        "fsdp2": build(config),
        "fsdp2_prefetch": prefetching(build(config)),
        "graphshard": build(config),
    }
    models["graphshard"].compile(backend="graphshard", fullgraph=True, options=options)
    tokens, targets = make_batch(config, dist.get_rank())
    for _ in range(REPLAN_AFTER + 2):
        losses = [step(m, tokens, targets) for m in models.values()]
        assert len({loss.item() for loss, _ in losses}) == 1
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(num_steps):
        for name, model in models.items():
            times[name].append(step(model, tokens, targets)[1])
    (compiled,) = root_states_under(models["graphshard"])[0].plans.values()
    assert isinstance(compiled.problem, Problem)
    dist.destroy_process_group()
    listed = with_lists(compiled.problem)
    return {
        "predicted": {
            "fsdp2": fsdp2(compiled.problem, cpu_placement).us,
            "fsdp2_prefetch": fsdp2(listed, cpu_placement).us,
            "graphshard": compiled.plan.estimate.step_time_us,
        },
        "measured": times,
    }


def step(model: Any, tokens: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """The loss, and microseconds of forward and backward. Both ranks begin together."""
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter_ns()
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach(), (time.perf_counter_ns() - began) / 1e3


def with_lists(problem: Problem) -> Problem:
    """The problem with the prefetch lists of `prefetching`; group 0 is the root."""
    blocks = [g.id for g in problem.groups if not g.is_root]

    def ahead(chain: Sequence[int], group: int) -> tuple[int, ...]:
        if group not in chain:
            return ()
        place = chain.index(group) + 1
        return tuple(chain[place : place + PREFETCHED])

    groups = tuple(
        replace(
            g,
            forward_prefetch=ahead(blocks, g.id),
            backward_prefetch=ahead(blocks[::-1], g.id),
        )
        for g in problem.groups
    )
    return replace(problem, groups=groups)


# -- all ranks, all rates ------------------------------------------------------------------------


def measure(
    gbits: Sequence[float], config: str, num_steps: int, say: Callable[[str], None]
) -> list[Row]:
    rows: list[Row] = []
    with netns.joined("truth") as network, tempfile.TemporaryDirectory() as folder:
        for gbit in gbits:
            netns.limit(network, gbit)
            say(f"{gbit:g} gbit: calibrating and measuring")
            command = [sys.executable, __file__, "--rank-of", folder]
            command += ["--config", config, "--steps", str(num_steps)]
            outputs = netns.launch(network, command, timeout_s=900)
            ranks = [json.loads(out.splitlines()[-1]) for out in outputs]
            for name in SCHEDULES:
                steps = tuple(map(max, *(rank["measured"][name] for rank in ranks)))
                predicted = ranks[0]["predicted"][name]
                rows.append(Row(gbit, name, predicted, median(steps), steps))
                say(render([rows[-1]]))
    return rows


def render(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"{row.gbit:>5g} {row.schedule:<18}{row.predicted_us / 1e3:>14.1f}"
        f"{row.measured_us / 1e3:>13.1f}{row.error:>9.1%}"
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted against measured steps.")
    parser.add_argument("--gbit", default="0.5,1,2")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        found = work(CONFIGS[args.config], args.steps, args.rank_of)
        print(json.dumps(found), flush=True)
        return 0
    if (reason := netns.missing()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    gbits = [float(part) for part in args.gbit.split(",")]
    loads = [os.getloadavg()]
    rows = measure(gbits, args.config, args.steps, lambda text: print(text, file=sys.stderr))
    loads.append(os.getloadavg())
    print(f"config {args.config}, two ranks, gloo, median of {args.steps} steps\n\n{HEADER}")
    print(render(rows))
    if args.json:
        result = {
            "command": " ".join(("python bench/truth.py", *sys.argv[1:])),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **machine.describe(ROOT),
            "load_averages": loads,
            "rows": [{**asdict(row), "error": row.error} for row in rows],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
