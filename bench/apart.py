"""What a process group of its own for reductions would gain, as the cost model has it.

    python bench/apart.py --json OUT.json

Plans of training steps on machines that are not here, each three times: with FSDP2's one process
group for gathers and reductions, after `set_separate_reduce_scatter_group()`, and as the planner
chooses. Two groups share the link (`graphshard/planner/links.py`), so the second one can hide
launches and let a collective pass another; it adds no bandwidth. One table on stdout, progress on
stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import graphshard  # noqa: E402
from bench import rounds  # noqa: E402
from bench.rounds import say  # noqa: E402
from graphshard.demo.llama import Config, Llama  # noqa: E402
from graphshard.demo.models import LLAMA3_8B  # noqa: E402
from graphshard.planner import separate_group  # noqa: E402
from graphshard.schedule.plan import Plan  # noqa: E402

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
    """is_chosen: the planner itself takes two process groups."""

    title: str
    memory_budget: str
    together_us: float
    apart_us: float
    lower_bound_us: float
    is_chosen: bool

    @property
    def gain(self) -> float:
        return 1 - self.apart_us / self.together_us


@contextmanager
def never_chosen() -> Iterator[None]:
    """Inside, the planner leaves reductions where the user puts them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, GRAPHSHARD_CACHE_DIR=folder),
        mock.patch.object(separate_group, "WORTH", float("inf")),
    ):
        yield


def planned(case: Case, *, apart: bool) -> Plan:
    """apart: the user asks for a second process group."""

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
    return graphshard.plan(
        model,
        (tokens, targets),
        world_size=case.ranks,
        hardware=HARDWARE,
        memory_budget=case.memory_budget,
        compute="inductor",
        shard=shard,
        name=case.title,
    )


def measure(case: Case) -> Row:
    with never_chosen():
        plans = [planned(case, apart=apart) for apart in (False, True)]
    together, apart = (plan.summary() for plan in plans)
    say(f"{case.title}, {case.memory_budget}: {together.step_time_us / 1e3:.2f} ms together")
    return Row(
        title=case.title,
        memory_budget=case.memory_budget,
        together_us=together.step_time_us,
        apart_us=apart.step_time_us,
        lower_bound_us=together.lower_bound_us,
        is_chosen=planned(case, apart=False).reduces_apart,
    )


def render(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':<28}{'budget':>8}{'one group':>12}{'two':>10}{'gain':>9}{'bound':>10}{'chosen':>8}"
    ]
    for row in rows:
        times = (row.together_us, row.apart_us, row.lower_bound_us)
        one, two, bound = (f"{us / 1e3:.2f}" for us in times)
        gain = f"{100 * row.gain:.2f} %"
        chosen = "yes" if row.is_chosen else "no"
        lines.append(
            f"{row.title:<28}{row.memory_budget:>8}{one:>12}{two:>10}{gain:>9}{bound:>10}{chosen:>8}"
        )
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
