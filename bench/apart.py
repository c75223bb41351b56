"""What a process group of its own for reductions would gain, as the cost model has it.

    python bench/apart.py --json OUT.json

Plans of training steps on machines that are not here, each twice: with FSDP2's one process group
for gathers and reductions, and after `set_separate_reduce_scatter_group()`. Two groups share the
link (`graphshard/planner/wires.py`), so the second one can hide launches and let a collective pass
another; it adds no bandwidth. One table on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import graphshard  # noqa: E402
from bench import rounds  # noqa: E402
from bench.rounds import say  # noqa: E402
from examples.llama import LLAMA3_8B, Config, Llama  # noqa: E402

HARDWARE = "h100-ib400"
SMALL = replace(LLAMA3_8B, num_layers=2, dim=256, num_heads=8, hidden=512, vocabulary=512)


@dataclass(frozen=True, slots=True)
class Case:
    """linears: each linear layer is a group of its own, so that launches count."""

    title: str
    config: Config
    ranks: int
    batch: int
    seq: int
    memory_budget: str
    linears: bool = False


CASES = (
    Case("8B, 64 ranks, 2 x 8,192", LLAMA3_8B, 64, 2, 8_192, "70GiB"),
    Case("8B, 512 ranks, 2 x 8,192", LLAMA3_8B, 512, 2, 8_192, "70GiB"),
    Case("8B, 512 ranks, 1 x 1,024", LLAMA3_8B, 512, 1, 1_024, "70GiB"),
    Case("8B, 512 ranks, 1 x 1,024", LLAMA3_8B, 512, 1, 1_024, "12GiB"),
    Case("8B, each linear, 512 ranks", LLAMA3_8B, 512, 1, 1_024, "12GiB", linears=True),
)
SMOKE = (Case("small, each linear", SMALL, 16, 1, 128, "1GiB", linears=True),)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    memory_budget: str
    together_us: float
    apart_us: float
    lower_bound_us: float

    @property
    def gain(self) -> float:
        return 1 - self.apart_us / self.together_us


def step_us(case: Case, *, apart: bool) -> tuple[float, float]:
    """The predicted step, and the time that no schedule beats."""

    def shard(model: nn.Module) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            parts = [m for m in layer.modules() if isinstance(m, nn.Linear)]
            for part in parts if case.linears else ():
                fully_shard(part, mp_policy=policy)
            fully_shard(layer, mp_policy=policy)
        root: Any = fully_shard(model, mp_policy=policy)
        if apart:
            root.set_separate_reduce_scatter_group()

    with torch.device("meta"):
        model = Llama(case.config, case.seq)
        tokens, targets = torch.zeros(2, case.batch, case.seq, dtype=torch.int64)
    plan = graphshard.plan(
        model,
        (tokens, targets),
        world_size=case.ranks,
        hardware=HARDWARE,
        memory_budget=case.memory_budget,
        compute="inductor",
        shard=shard,
        name=case.title,
    )
    assert plan.estimate is not None
    return plan.estimate.ours.step_time_us, plan.estimate.lower_bound_us


def measure(case: Case) -> Row:
    together_us, bound_us = step_us(case, apart=False)
    apart_us, _ = step_us(case, apart=True)
    say(f"{case.title}, {case.memory_budget}: {together_us / 1e3:.2f}, {apart_us / 1e3:.2f} ms")
    return Row(case.title, case.memory_budget, together_us, apart_us, bound_us)


def render(rows: Sequence[Row]) -> str:
    lines = [f"{'':<28}{'budget':>8}{'one group':>12}{'two':>10}{'gain':>9}{'bound':>10}"]
    for row in rows:
        times = (row.together_us, row.apart_us, row.lower_bound_us)
        one, two, bound = (f"{us / 1e3:.2f}" for us in times)
        gain = f"{100 * row.gain:.2f} %"
        lines.append(f"{row.title:<28}{row.memory_budget:>8}{one:>12}{two:>10}{gain:>9}{bound:>10}")
    return "\n".join([*lines, f"\nPredicted steps in ms on {HARDWARE}."])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Reductions on a process group of their own.")
    parser.add_argument("--smoke", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    rows = [measure(case) for case in (SMOKE if args.smoke else CASES)]
    if args.json:
        result = {**rounds.header("apart.py"), "hardware": HARDWARE}
        rounds.write(args.json, {**result, "rows": [{**asdict(r), "gain": r.gain} for r in rows]})
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
