"""Predicted training steps beside those that others published (`bench/published.toml`).

    python bench/published.py --json bench/results/published.json

Each is priced as `graphshard tune` prices a setting: FSDP2's own schedule, gradients clipped,
AdamW; nothing runs, no GPU is needed. One table on stdout: errors by row and in the mean, of the
fitted rows and of those held out; progress on stderr.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from bench.published_models import LLAMA, RANKS_PER_NODE, build  # noqa: E402
from graphshard.compiler.planning import problem_of  # noqa: E402
from graphshard.cost.curve import Trust, line, scaled  # noqa: E402
from graphshard.cost.machine import Machine  # noqa: E402
from graphshard.cost.optimizer import Optimizer  # noqa: E402
from graphshard.cost.presets import preset  # noqa: E402
from graphshard.cost.roofline import AttentionRate, Bandwidth, Kernel  # noqa: E402
from graphshard.cost.stragglers import with_stragglers  # noqa: E402
from graphshard.offline.target import Sizes, made_of  # noqa: E402
from graphshard.offline.world import Made  # noqa: E402
from graphshard.pricing.lifetimes import Lifetime  # noqa: E402
from graphshard.pricing.reserved import reserved_bytes  # noqa: E402
from graphshard.schedule.plan import Direction  # noqa: E402
from graphshard.schedule.setting import (  # noqa: E402
    Checkpointing,
    Grouping,
    Resharding,
    Scheduling,
    Setting,
)
from graphshard.tune.pricing import Pricer  # noqa: E402
from graphshard.tune.subject import Machines, Subject  # noqa: E402

ROWS = ROOT / "bench" / "published.toml"
GIB = 2**30
CLIPPED = Optimizer(clips=True)
NOISE = 0.01  # what two published figures have to differ by for an order to mean something


@dataclass(frozen=True, slots=True)
class Row:
    """One published step; see the head of `bench/published.toml`."""

    source: str
    machine: str
    family: str
    model: str
    gpus: int
    seq: int
    batch: int
    recompute: str
    tokens_per_s: int
    split: str
    accumulate: int = 1
    compiled: bool = False
    precision: str = "mixed"
    mesh: str = "fsdp"
    fsdp: int = 2
    memory_gib: float | None = None
    software: str = ""
    keeps_logits: bool = False
    compiled_loss: bool = False

    @property
    def name(self) -> str:
        compute = "compiled" if self.compiled else "eager"
        return (
            f"{self.family} {self.model}, {self.gpus} {self.machine}, {self.batch} x {self.seq:,}, "
            f"{self.recompute}, {compute}, {self.precision}"
            + (f", {self.mesh}" if self.mesh != "fsdp" else "")
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """A whole step: forward, backward, gradients clipped, optimizer."""

    tokens_per_s: float
    reserved_gib: float


def published() -> list[Row]:
    found = []
    for source in tomllib.loads(ROWS.read_text())["source"]:
        shared = {k: v for k, v in source.items() if k not in ("id", "url", "says", "rows")}
        found += [Row(source=source["id"], **{**shared, **row}) for row in source["rows"]]
    return found


def predictions(rows: Sequence[Row]) -> Iterator[tuple[Row, Predicted]]:
    """As `graphshard tune` prices what a model does by itself; one capture for all rows of a model,
    a length, a precision, a mesh and what is computed again."""
    for key, found in groupby(sorted(rows, key=_model), key=_model):
        alike = list(found)
        rounds.say(f"{' '.join(map(str, key))}: {len(alike)} rows")

        def made(sizes: Sizes, row: Row = alike[0]) -> Made:
            return made_of(row.model, build(*_made_of(row), batch=dict(sizes)["batch"]))

        machines = Machines(machine_of(alike[0]), RANKS_PER_NODE, alike[0].compiled)
        worlds, sizes = (tuple(dict.fromkeys(map(of, alike))) for of in (_gpus, _sizes))
        subject = Subject(alike[0].model, made, machines, worlds, sizes, optimizer=CLIPPED)
        subject.prepare(regroups=False)
        for _, own in groupby(sorted(alike, key=_where), key=_where):
            same = list(own)
            pricer = Pricer(subject.on(machine_of(same[0])))
            for row in same:
                yield row, predicted(row, pricer)


def _model(row: Row) -> tuple[Any, ...]:
    return (*_made_of(row), row.compiled)


def _made_of(row: Row) -> tuple[Any, ...]:
    shape = row.family, row.model, row.seq, row.recompute
    return (*shape, row.precision, row.mesh, row.compiled_loss)


def _gpus(row: Row) -> int:
    return row.gpus


def _sizes(row: Row) -> Sizes:
    return (("batch", row.batch), ("seq", row.seq))


def _where(row: Row) -> tuple[str, str]:
    return row.machine, row.software


def setting_of(row: Row) -> Setting:
    """What its publishers ran: the model's own calls, in FSDP2's order."""
    return Setting(
        row.gpus,
        None,
        Grouping.AS_IS,
        Resharding.AS_IS,
        Checkpointing.AS_IS,
        _sizes(row),
        micro_steps=row.accumulate,
        scheduling=Scheduling.FSDP2,
    )


def machine_of(row: Row) -> Machine:
    """The preset, with what the software of that time was slower in."""
    machine, own = preset(row.machine), preset(row.machine).processor
    known = tomllib.loads(ROWS.read_text())["software"].get(row.software, {}).get(row.machine)
    if known is None:
        return machine
    slower = {a.dtype: scaled(a.curve, 1, known.get("products", 1.0)) for a in own.arithmetic}
    fused = Bandwidth(Kernel.FUSED, scaled(own.memory, 1, known.get("fused", 1.0)))
    then = replace(
        own,
        arithmetic=tuple(replace(a, curve=slower[a.dtype]) for a in own.arithmetic),
        attention=(
            _attention(known["attention_forward"], own.memory.base_us, backward=False),
            _attention(known["attention_backward"], own.memory.base_us, backward=True),
        ),
        slower=(*own.slower, fused),
    )
    return replace(machine, name=f"{row.machine}, {row.software}", processor=then)


def _attention(entry: dict[str, float], launch_us: float, *, backward: bool) -> AttentionRate:
    curve, half = line(launch_us, entry["flops_per_s"] / 1e6), entry["half_length"]
    return AttentionRate("bfloat16", curve, Trust.PRESET, backward=backward, half_length=half)


def predicted(row: Row, pricer: Pricer) -> Predicted:
    """FSDP2's own schedule, which is what the publishers ran."""
    setting = setting_of(row)
    priced = pricer.price(setting)
    costs, planning = pricer.inputs(setting)
    assert priced.plan is not None
    assert priced.plan.fsdp2 is not None
    estimate = with_stragglers(priced.plan, planning.machine, row.gpus).estimate
    waits_us = 0.0 if estimate.stragglers is None else estimate.stragglers.fsdp2_us
    rate = pricer.tokens_per_s(setting, priced.step_us + waits_us) / row.gpus
    tensors = kept_by_eager(row, costs.lifetimes)
    capacity_bytes = preset(row.machine).processor.capacity_bytes
    problem = problem_of(costs, planning)
    reserved = reserved_bytes(
        priced.plan.fsdp2.schedules, problem, costs.groups, tensors, capacity_bytes
    )
    return Predicted(rate, reserved / GIB)


def kept_by_eager(row: Row, tensors: Sequence[Lifetime]) -> list[Lifetime]:
    """What autograd and the script keep until backward, but the captured graph does not: products
    that selective checkpointing stores unread, and the logits, where the script held them."""
    logits_bytes = (
        row.batch * row.seq * LLAMA[row.family, row.model].vocabulary * 4 if row.keeps_logits else 0
    )
    last = max(one.last for one in tensors if one.last.direction is Direction.BACKWARD)
    found, saved = [], last
    for one in tensors:
        is_saved = one.last.direction is Direction.BACKWARD
        if is_saved and one.born.direction is Direction.FORWARD:
            saved = one.last
        if one.size_bytes == logits_bytes:
            one, logits_bytes = replace(one, last=last), 0
        elif one.is_wanted and not is_saved and not row.compiled:
            one = replace(one, last=saved)  # with what was saved before it
        found.append(one)
    return found


def error_of(found: float, row_value: float) -> float:
    return found / row_value - 1


def render(found: Sequence[tuple[Row, Predicted]]) -> str:
    lines = [f"{'':<72}{'published':>10}{'predicted':>10}{'error':>8}{'GiB':>8}{'':>8}{'error':>8}"]
    for row, told in sorted(found, key=lambda pair: (pair[0].split, pair[0].source)):
        line = f"{row.name:<72}{row.tokens_per_s:>10,}{told.tokens_per_s:>10,.0f}"
        line += f"{error_of(told.tokens_per_s, row.tokens_per_s):>+8.1%}"
        if row.memory_gib is not None:
            memory = error_of(told.reserved_gib, row.memory_gib)
            line += f"{row.memory_gib:>8.1f}{told.reserved_gib:>8.1f}{memory:>+8.1%}"
        lines.append(f"{line}  {row.split}")
    lines.append("")
    splits = {row.split for row, _ in found}
    for split in sorted(splits):
        lines.append(f"{split}: {summary([pair for pair in found if pair[0].split == split])}")
    pairs = rankings(found)
    right = sum(is_right(*pair) for pair in pairs)
    lines.append(f"{right} of {len(pairs)} pairs of settings of a model ranked as published")
    for one, other in pairs:
        if not is_right(one, other):
            lines.append(f"not so: {one[0].name}; {other[0].name}")
    return "\n".join(lines)


Found = tuple[Row, Predicted]


def rankings(found: Sequence[Found]) -> list[tuple[Found, Found]]:
    """Pairs of rows of one source, model and number of GPUs, the faster one first, but for those
    that differ by less than NOISE."""
    return [
        (one, other)
        for one, other in permutations(found, 2)
        if _settings_of(one[0]) == _settings_of(other[0])
        and error_of(one[0].tokens_per_s, other[0].tokens_per_s) > NOISE
    ]


def is_right(one: Found, other: Found) -> bool:
    """The first is predicted to be the faster one."""
    return one[1].tokens_per_s > other[1].tokens_per_s


def _settings_of(row: Row) -> tuple[str, str, int]:
    return row.source, row.model, row.gpus


def summary(found: Sequence[tuple[Row, Predicted]]) -> str:
    tokens = [abs(error_of(p.tokens_per_s, r.tokens_per_s)) for r, p in found]
    memory = [abs(error_of(p.reserved_gib, r.memory_gib)) for r, p in found if r.memory_gib]
    text = f"{len(tokens)} rows, tokens/s off by {_mean(tokens):.1%}, at most {max(tokens):.1%}"
    return f"{text}; memory of {len(memory)} by {_mean(memory):.1%}" if memory else text


def _mean(errors: Sequence[float]) -> float:
    return sum(errors) / len(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description="Predictions beside published figures.")
    parser.add_argument("--source", help="only rows of this source")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    rows = [row for row in published() if args.source in (None, row.source)]
    found = list(predictions(rows))
    if args.json:
        result = [{**asdict(row), "predicted": asdict(told)} for row, told in found]
        rounds.write(args.json, {**rounds.header("published.py"), "rows": result})
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
