"""What examples/train.py measures, compares and prints; nothing of it is needed to train.

In: runs of one job, on every rank. Out: `Comparison`, the same on all ranks, and text on rank 0's
stdout.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import profile

import graphshard
from graphshard.view import html

# Other kernels add up in another order, and training enlarges what differs: after 100 steps eager
# losses are 7e-2 apart if the weights it began with differ by 1e-7 of their size.
CLOSE = 1e-3  # of a loss
CLOSE_STEPS = 30

Advance = Callable[[str], None]


@dataclass(slots=True)
class Run:
    """One model on its way, and what was seen of it: this rank's loss and time of each step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    gathered_peak_bytes: int = 0


# -- memory: the same measurement for all runs, from outside both --------------------------------


def gathered_peak_bytes(profiler: profile) -> int:
    """Most bytes of gathered parameters that were allocated at one time during a profiled step.

    Counted are the allocations made while one of the ranges `FSDP::all_gather*` (FSDP2) or
    `graphshard::all_gather*` was open in the same thread, each until the allocator reports its
    address free: the buckets that all-gathers write to and the parameters copied out of them.
    Gradients, activations and shards are not among them, nor is what gloo allocates for itself
    inside the collective (c10d::*).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e.get("cat") in ("user_annotation", "cpu_op")]
    gathers = [e for e in spans if "::all_gather" in e["name"]]
    inside_gloo = [e for e in spans if e["name"].startswith("c10d::")]
    alive: dict[int, int] = {}
    peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes < 0:
            alive.pop(address, None)
        elif is_inside(event, gathers) and not is_inside(event, inside_gloo):
            alive[address] = num_bytes
            peak = max(peak, sum(alive.values()))
    return peak


def is_inside(event: dict[str, Any], spans: list[dict[str, Any]]) -> bool:
    tid, time_us = event["tid"], event["ts"]
    return any(s["tid"] == tid and s["ts"] <= time_us <= s["ts"] + s["dur"] for s in spans)


# -- ranks ----------------------------------------------------------------------------------------


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that rank 0 makes, tells the others, and removes."""
    name = [tempfile.mkdtemp(prefix="graphshard-demo-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def on_every_rank(ok: bool) -> bool:
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, ok)
    return all(answers)


def mean_over_ranks(values: dict[int, float]) -> dict[int, float]:
    gathered: list[dict[int, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return {step: statistics.fmean(of_rank[step] for of_rank in gathered) for step in values}


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


# -- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """Of one run. Losses are means over the ranks; peak: bytes of gathered parameters, measured."""

    name: str
    losses: list[float]
    first_ms: float
    step_ms: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """equal: losses and final parameters of the bitwise run and eager FSDP2's, to the last bit, on
    every rank. resumes: the same of the resumed run and the one that it resumed. apart: the most by
    which a loss of the default run is off, of a loss."""

    columns: tuple[Column, ...]
    equal: bool
    resumes: bool
    apart: float

    @property
    def holds(self) -> bool:
        return self.equal and self.resumes and self.apart <= CLOSE


def compared(eager: Run, default: Run, exact: Run, resumed: Run) -> Comparison:
    columns = tuple(map(column, (eager, default, exact)))
    pairs = list(zip(columns[0].losses, columns[1].losses, strict=True))[:CLOSE_STEPS]
    apart = max(abs(theirs / ours - 1) for ours, theirs in pairs)
    return Comparison(columns, same(eager, exact), same(exact, resumed), apart)


def column(run: Run) -> Column:
    losses = mean_over_ranks(run.losses)
    later = [seconds for step, seconds in run.seconds.items() if step > 0]
    return Column(
        run.name,
        list(losses.values()),
        1e3 * run.seconds[0],
        1e3 * statistics.median(later),
        run.gathered_peak_bytes,
    )


def same(one: Run, other: Run) -> bool:
    """In all losses of the steps that `other` made, and in all parameters, on every rank."""
    losses = all(one.losses[step] == loss for step, loss in other.losses.items())
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return on_every_rank(losses and all(torch.equal(local(a), local(b)) for a, b in pairs))


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


# -- text -----------------------------------------------------------------------------------------

MEANING = """
  loss              the mean over the processes; bit by bit it is the same number, to the last bit
  first step        with the time that it takes to capture, plan and compile
  step              the median of the others: forward, backward, clipping, optimizer
  gathered at peak  most bytes of unsharded parameters at one time: what graphshard may keep within
                    FSDP2's own peak of memory
  graphshard        as it is by default: Inductor compiles the kernels
  bit by bit        options={"compute": "aten"}: FSDP2's own kernels, in graphshard's plan"""


def print_comparison(found: Comparison, run: Run, saved_step: int, text: str) -> None:
    """run: graphshard's by default. text: what the resumed model wrote."""
    num_steps, world = len(found.columns[0].losses), dist.get_world_size()
    num_params = sum(p.numel() for p in run.model.parameters())
    device = next(run.model.parameters()).device.type
    say(f"\n{num_params:,} parameters, {num_steps} steps, {world} processes, {device}\n")
    say(table(found))
    say(MEANING)
    say(f"\n{graphshard.explain(run.model)}")
    say(f"\nresumed from the checkpoint of step {saved_step} in a fresh model; it writes:\n{text}")
    say(
        f"\nequal to eager FSDP2 to the last bit: {yes_no(found.equal)}    "
        f"resumed equally: {yes_no(found.resumes)}    "
        f"compiled, off by {found.apart:.0e} of a loss (at most {CLOSE:g})"
    )


def table(found: Comparison) -> str:
    columns = found.columns
    places = sorted({0, len(columns[0].losses) // 2, len(columns[0].losses) - 1})
    rows = {"": [c.name for c in columns]}
    rows |= {f"loss, step {place}": [f"{c.losses[place]:.9f}" for c in columns] for place in places}
    rows |= {
        "first step": [f"{c.first_ms:,.0f} ms" for c in columns],
        "step": [f"{c.step_ms:,.1f} ms" for c in columns],
        "gathered at peak": [megabytes(c.peak_bytes) for c in columns],
    }
    return "\n".join(_row(title, cells) for title, cells in rows.items())


def megabytes(num_bytes: int) -> str:
    # One process gathers nothing: there is no all-gather to look into.
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes else "-"


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:<20}" + "".join(f"{cell:>16}" for cell in cells)


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def write_schedule(run: Run, out: Path) -> None:
    """The plan as JSON, and the picture that `graphshard view PLAN.json -o OUT` makes of it."""
    plan = graphshard.plans(run.model)[0]
    if dist.get_rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(plan.to_json())
        out.write_text(html.render(plan), encoding="utf-8")
    say(f"\nwrote {out} and {out.with_suffix('.json')}")


def write_facts(found: Comparison, out: Path) -> None:
    if dist.get_rank() == 0:
        out.write_text(json.dumps(asdict(found)))


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Yields `advance(what)`. A bar on rank 0's terminal, plain lines in a log or without rich."""
    if dist.get_rank() != 0:
        yield lambda what: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield plain_progress(total)
        return
    if not sys.stderr.isatty():
        yield plain_progress(total)
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def plain_progress(total: int) -> Advance:
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        if done % 10 == 0 or done == total:
            print(f"[{done:>4}/{total}] {what}", file=sys.stderr, flush=True)

    return advance
