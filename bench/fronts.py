"""Predicted time of a step against its budget of memory: the plan's own choice of what backward
computes again and the host holds, the same without a host, and what people choose by hand.

    python bench/fronts.py --json bench/results/fronts.json --svg docs/fronts.svg

Llama 3 8B, 70B and Mixtral 8x7B on two networks, compute priced as fused. Eight budgets, from
FSDP2's peak with every block checkpointed to its peak with none. The plan is given the checkpointed
model and may replace that; the others keep what they have (`activation_memory_budget`: Inductor's
partition), and are planned at the same budgets. Fronts run side by side. Tables on stdout, progress
on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.rounds import say  # noqa: E402
from graphshard.compiler.planning_inputs import policy_of  # noqa: E402
from graphshard.cost.presets import preset  # noqa: E402
from graphshard.demo import llama, models  # noqa: E402
from graphshard.offline.point import Answer, Point  # noqa: E402
from graphshard.offline.study import Study  # noqa: E402
from graphshard.offline.target import made_of  # noqa: E402
from graphshard.options import parse_options  # noqa: E402
from graphshard.view.front import Panel, Series, Spot, front_svg  # noqa: E402

OURS = PLAN, NO_HOST = "graphshard's plan", "the same without a host"
BEST = "activation_memory_budget, best"
SETTINGS = {
    "none": "nothing checkpointed",
    "products": "all products saved",
    "selective": "every second product saved",
    "alternate": "every second block checkpointed",
    "full": "every block checkpointed",
}
FRACTIONS = (0.3, 0.5, 0.7, 0.8, 0.9)
NETWORKS = ("h100-ib400", "h100-ethernet100")
COUNT, RANKS_PER_NODE, LENGTH = 8, 8, 8192


@dataclass(frozen=True, slots=True)
class Model:
    """batch: sequences of a rank."""

    title: str
    config: Any
    world_size: int
    batch: int


MODELS = {
    "8b": Model("Llama 3 8B", models.LLAMA3_8B, 64, 2),
    "70b": Model("Llama 3 70B", models.LLAMA3_70B, 512, 1),
    "moe": Model("Mixtral 8x7B", models.MIXTRAL_8X7B, 64, 2),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """At one budget; None: it does not fit."""

    step_us: float
    peak_bytes: int


Row = list[Cell | None]


@dataclass(frozen=True, slots=True)
class Front:
    """rows: by who chooses, one cell for each budget."""

    model: str
    machine: str
    budgets_bytes: list[int]
    rows: dict[str, Row]

    @property
    def title(self) -> str:
        return f"{MODELS[self.model].title}, {MODELS[self.model].world_size} x {self.machine}"

    def ratios(self, ours: str = PLAN) -> list[float | None]:
        """Of a plan's step to the best of the others, where one of them fits."""
        found: list[float | None] = []
        for place, own in enumerate(self.rows[ours]):
            cells = [row[place] for name, row in self.rows.items() if name not in OURS]
            best = min((cell.step_us for cell in cells if cell), default=None)
            found.append(own.step_us / best if own and best else None)
        return found


def front(name: str, machine: str) -> Front:
    """In a process of its own, which keeps no plan of another run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAPHSHARD_CACHE_DIR"] = folder
        low, high = (
            _answers(name, machine, setting, [None])[0].plan.estimate.fsdp2.peak_bytes
            for setting in ("full", "none")
        )
        budgets = [low + (high - low) * n // (COUNT - 1) for n in range(COUNT)]
        rows = dict(_rows(name, machine, budgets))
    return Front(name, machine, budgets, rows)


def _rows(name: str, machine: str, budgets: Sequence[int]) -> Iterator[tuple[str, Row]]:
    def told(who: str, answers: Sequence[Answer]) -> tuple[str, Row]:
        say(f"{name} {machine}: {who}")
        return who, [_cell(answer) for answer in answers]

    yield told(PLAN, _answers(name, machine, "full", budgets, free=True))
    alone = _answers(name, machine, "full", budgets, free=True, offload="never")
    yield told(NO_HOST, alone)
    for setting, title in SETTINGS.items():
        yield told(title, _answers(name, machine, setting, budgets))
    best: Row = [None] * COUNT
    for fraction in FRACTIONS:
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            _, row = told(
                f"activation_memory_budget {fraction}", _answers(name, machine, "none", budgets)
            )
        best = [_faster(one, other) for one, other in zip(best, row, strict=True)]
    yield BEST, best


def _answers(
    name: str,
    machine: str,
    setting: str,
    budgets: Sequence[int | None],
    *,
    free: bool = False,
    offload: str = "auto",
) -> list[Any]:
    """free: what is computed again is the plan's choice."""
    model, costs = MODELS[name], preset(machine)

    def point(budget: int | None) -> Point:
        given = {} if budget is None else {"memory_budget": budget, "offload": offload}
        policy = policy_of(parse_options(given, elsewhere={}), costs)
        if not free:
            policy = replace(policy, recompute=False, replaces_checkpoints=False, offload=False)
        return Point(model.world_size, RANKS_PER_NODE, costs, policy, fused=True)

    def build(sizes: object) -> Any:
        config = replace(model.config, recompute=setting)
        return made_of(name, llama.sharded(config, model.batch, LENGTH))

    return list(Study(name, build, tuple(map(point, budgets))).answers())


def _cell(answer: Answer) -> Cell | None:
    if answer.plan is None:
        return None
    return Cell(answer.plan.estimate.step_time_us, answer.plan.estimate.peak_bytes)


def _faster(one: Cell | None, other: Cell | None) -> Cell | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda cell: cell.step_us)


def table(found: Front) -> str:
    lines = ["".join([found.title.ljust(36), *(f"{b / 2**30:>9.1f}" for b in found.budgets_bytes)])]
    for name, row in found.rows.items():
        cells = ("-".rjust(9) if cell is None else f"{cell.step_us / 1e6:>9.3f}" for cell in row)
        lines.append("".join([name.ljust(36), *cells]))
    for name in OURS:
        ratios = ("-".rjust(9) if r is None else f"{r:>9.3f}" for r in found.ratios(name))
        lines.append("".join([f"{name} / best".ljust(36), *ratios]))
    return "\n".join(lines)


def picture(fronts: Sequence[Front]) -> str:
    """Time against the budget."""

    def series(found: Front, name: str) -> Series:
        cells = zip(found.budgets_bytes, found.rows[name], strict=True)
        return Series(name, tuple(Spot(size, c.step_us) for size, c in cells if c is not None))

    panels = [Panel(f.title, tuple(series(f, name) for name in f.rows)) for f in fronts]
    return front_svg(panels, columns=2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted steps under budgets of memory.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--machines", default=",".join(NETWORKS))
    parser.add_argument("--jobs", type=int, default=2, help="fronts side by side")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--svg", type=Path, help="write a picture to this file")
    args = parser.parse_args()
    asked = list(product(args.models.split(","), args.machines.split(",")))
    found: Mapping[tuple[str, str], Front] = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(front, *one) for one in asked]):
            one = done.result()
            found = {**found, (one.model, one.machine): one}
            fronts = [found[key] for key in asked if key in found]
            if args.json:
                rows = [
                    {**asdict(f), "ratios": f.ratios(), "without_a_host": f.ratios(NO_HOST)}
                    for f in fronts
                ]
                rounds.write(args.json, {**rounds.header("fronts.py"), "fronts": rows})
            if args.svg:
                args.svg.write_text(picture(fronts))
    print("\n\n".join(map(table, fronts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
