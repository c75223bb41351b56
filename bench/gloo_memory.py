"""Peak and compute of a step under a sweep of budgets, on real ranks over gloo, against the plan.

    python bench/gloo_memory.py --config S --budgets 8 --json OUT.json

Inductor's code, one thread a rank. The machine is calibrated first. The budgets go from the least
that fits to FSDP2's own peak as the plan predicts it. At each budget a training without one takes
turns with it, step by step: the ratio of the CPU times of their computing threads says how much
longer compute takes, what is computed again included. Steps are forward and backward; peaks are
torch's profiler's. One table on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import multiprocessing as mp  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from bench import rounds  # noqa: E402
from bench.memory import Spot, budgets, render  # noqa: E402
from bench.models import CONFIGS, Config, Llama, WithLoss, make_batch  # noqa: E402
from bench.modes import NO_LIMIT_BYTES  # noqa: E402
from bench.peaks import resident_bytes, step_peaks  # noqa: E402
from bench.rounds import say  # noqa: E402

WARM_UP_STEPS = 3


class Training:
    """A model under a budget, with an optimizer whose state is there."""

    def __init__(self, config: Config, machine: str, budget_bytes: int) -> None:
        torch.manual_seed(0)
        self.model: Any = WithLoss(Llama(config))
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.batch = make_batch(config, dist.get_rank())
        options = {
            "fallback": "error",
            "compute": "inductor",
            "machine": machine,
            "memory_budget": budget_bytes,
            "replan_after": 0,
        }
        self.model.compile(backend="graphshard", fullgraph=True, options=options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(WARM_UP_STEPS):
            self.step()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        self.model(*self.batch).backward()

    def timed(self) -> tuple[float, float]:
        """Microseconds of a step: by the clock, and of the thread that computes."""
        dist.barrier()
        began, busy = time.perf_counter(), time.thread_time()
        self.step()
        took = time.perf_counter() - began, time.thread_time() - busy
        self.optimizer.zero_grad()
        return 1e6 * took[0], 1e6 * took[1]

    @property
    def plan(self) -> Any:
        import graphshard

        return graphshard.plans(self.model)[-1]

    @property
    def peak_bytes(self) -> int:
        return step_peaks(self.step).allocated_bytes + resident_bytes(self.optimizer)


def least_and_most(config: Config, machine: str) -> tuple[int, int]:
    """The least budget that fits, and FSDP2's own predicted peak."""
    from graphshard.errors import InfeasibleBudget
    from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES

    try:
        Training(config, machine, LEAST_PLAUSIBLE_BYTES)
    except InfeasibleBudget as error:
        least_bytes = error.shortage.least_bytes
    torch._dynamo.reset()
    freely = Training(config, machine, NO_LIMIT_BYTES)
    return least_bytes, freely.plan.estimate.fsdp2.peak_bytes


def measured(spot: Spot, config: Config, machine: str, num_steps: int) -> dict[str, Any]:
    """The fields of `spot` on this rank."""
    assert spot.budget_bytes is not None
    torch._dynamo.reset()
    ours = Training(config, machine, spot.budget_bytes)
    freely = Training(config, machine, NO_LIMIT_BYTES)
    gc.collect()
    times = []
    for index in range(num_steps):
        turn = [one.timed() for one in rounds.turns((ours, freely), index)]
        times.append(tuple(rounds.turns(turn, index)))  # ours first
    told, base = ours.plan.estimate.ours, freely.plan.estimate.ours
    busy_us, base_us = (one.step_time_us - one.exposed_us for one in (told, base))
    return {
        "step_us": median(own[0] for own, _ in times),
        "busy_us": median(own[1] for own, _ in times),
        "busy_ratio": median(own[1] / other[1] for own, other in times),
        "peak_bytes": ours.peak_bytes,
        "predicted_us": told.step_time_us,
        "predicted_busy_us": busy_us,
        "predicted_busy_ratio": busy_us / base_us,
        "predicted_peak_bytes": told.peak_bytes,
    }


def calibrated(path: Path) -> str:
    from graphshard.calibrate.calibrate import calibrate

    assert dist.group.WORLD is not None
    path.write_text(calibrate({"world": dist.group.WORLD}, torch.device("cpu")).to_json())
    return str(path)


def work(rank: int, args: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store)
    machine = args.machine or calibrated(folder / f"machine{rank}.json")
    config = CONFIGS[args.config]
    least, most = least_and_most(config, machine)
    spots: list[Spot] = []
    for spot in budgets(least, most, args.budgets):
        own = measured(spot, config, machine, args.steps)
        ranks: list[Any] = [None] * args.ranks
        dist.all_gather_object(ranks, own)
        # The rank that computed longest, and the one that held most.
        found = {key: max(one[key] for one in ranks) for key in own}
        spots.append(Spot(spot.name, spot.budget_bytes, **found))
        if rank == 0:
            say(f"{spot.name}: {found['step_us'] / 1e3:.1f} ms")
    if rank == 0:
        (folder / "spots.json").write_text(json.dumps([asdict(spot) for spot in spots]))
    dist.destroy_process_group()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peak and compute by budget, on real ranks.")
    parser.add_argument("--config", choices=list(CONFIGS), default="S")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--machine", default="", help="a preset; nothing is calibrated")
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="measured steps at each budget")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(work, (args, folder), nprocs=args.ranks)  # type: ignore[no-untyped-call]
        rows: list[dict[str, Any]] = json.loads((folder / "spots.json").read_text())
    title = f"config {args.config}, {args.ranks} ranks over gloo"
    print(f"forward and backward, {title}\n\n{render([Spot(**row) for row in rows])}")
    if args.json:
        rounds.write(args.json, {**rounds.header("gloo_memory.py"), "title": title, "spots": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
