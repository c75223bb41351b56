"""Train a small language model with eager FSDP2 and with graphshard, and compare.

    torchrun --nproc-per-node 2 examples/train.py

With GPUs the processes take one each and talk through NCCL, without they use the CPU and gloo.
What is particular to graphshard is one line: `model.compile(backend="graphshard")`. The rest is a
usual FSDP2 script. It trains three times: with eager FSDP2, with graphshard and FSDP2's own kernels
(`compute="aten"`, the same to the last bit), and with graphshard as it is by default, where
Inductor compiles the kernels. Results go to stdout; exit status 1 if a loss or parameter of the
second run differs by a bit, or a loss of the third by more than CLOSE.
Checkpoints go to a temporary folder, so all processes have to share one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tiny_llama import Llama, LlamaConfig, build, generate
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import profile

import graphshard
from graphshard.view import html

SEED = 20
CORPUS_BYTES = 4_000_000
SAMPLE_BYTES = 160
PROMPT = b"def "
# Other kernels add up in another order, and training enlarges what differs: after 100 steps eager
# losses are 7e-2 apart if the weights it began with differ by 1e-7 of their size.
CLOSE = 1e-3  # of a loss
CLOSE_STEPS = 30

Advance = Callable[[str], None]


def read_corpus() -> Tensor:
    """The source of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    text = b"".join((folder / name).read_bytes() for name in files)[:CORPUS_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Job:
    """What does not change between the runs. `advance(what)` moves the progress bar."""

    config: LlamaConfig
    mesh: DeviceMesh
    corpus: Tensor
    batch_size: int
    num_steps: int
    saved_step: int  # the checkpoint holds this many steps
    advance: Advance

    @property
    def device(self) -> str:
        return self.mesh.device_type

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch of `step`: bytes, and the bytes that follow them."""
        seq_len, rank = self.config.seq_len, self.mesh.get_rank()
        generator = torch.Generator().manual_seed(SEED + step)
        shape = (self.mesh.size(), self.batch_size)
        starts = torch.randint(len(self.corpus) - seq_len, shape, generator=generator)[rank]
        rows = torch.stack([self.corpus[s : s + seq_len + 1] for s in starts.tolist()])
        rows = rows.to(self.device, torch.int64)
        return rows[:, :-1], rows[:, 1:]


@dataclass(slots=True)
class Run:
    """One model on its way, and what was seen of it: this rank's loss and time of each step."""

    name: str
    model: Llama
    optimizer: torch.optim.Optimizer
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    gathered_peak_bytes: int = 0


def start(name: str, job: Job, *, seed: int = SEED, compute: str | None = "aten") -> Run:
    """compute: None for eager FSDP2."""
    model = build(job.config, job.mesh, seed)
    if compute is not None:
        model.compile(backend="graphshard", options={"compute": compute})
    return Run(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train_step(run: Run, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = run.model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.detach()


def train(run: Run, job: Job, first: int, stop: int) -> None:
    """Steps `first` to `stop - 1`; the very last step of the job is measured for memory."""
    for step in range(first, stop):
        inputs, targets = job.batch(step)
        measured = step == job.num_steps - 1
        began = time.perf_counter()
        with profile(profile_memory=True) if measured else nullcontext() as profiler:
            # .item() waits for the loss, synchronize() for the optimizer behind it.
            run.losses[step] = train_step(run, inputs, targets).item()
            if job.device != "cpu":
                torch.accelerator.synchronize()
        if profiler is None:
            run.seconds[step] = time.perf_counter() - began
        else:
            run.gathered_peak_bytes = gathered_peak_bytes(profiler)
        job.advance(run.name)


# -- memory: the same measurement for both runs, from outside both --------------------------------


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


# -- checkpoint -----------------------------------------------------------------------------------


def save(run: Run, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(run: Run, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )


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


# -- comparison and report ------------------------------------------------------------------------


def on_every_rank(ok: bool) -> bool:
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, ok)
    return all(answers)


def mean_over_ranks(values: dict[int, float]) -> dict[int, float]:
    gathered: list[dict[int, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return {step: statistics.fmean(of_rank[step] for of_rank in gathered) for step in values}


def same_losses(one: Run, other: Run) -> dict[int, bool]:
    """Step -> equal to the last bit on every rank, for the steps that `other` made."""
    return {s: on_every_rank(one.losses[s] == loss) for s, loss in other.losses.items()}


def same_parameters(one: Run, other: Run) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return on_every_rank(all(torch.equal(local(a), local(b)) for a, b in pairs))


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def print_losses(one: Run, other: Run) -> bool:
    """Table of the steps that `other` made. True if losses and final parameters are equal."""
    equal, same = same_losses(one, other), same_parameters(one, other)
    ours, theirs = mean_over_ranks(one.losses), mean_over_ranks(other.losses)
    say(f"\n{'step':>6}{one.name:>22}{other.name:>22}   equal")
    for step, is_equal in equal.items():
        left, right = f"{ours[step]:.9f}", f"{theirs[step]:.9f}"
        say(f"{step:>6}{left:>22}{right:>22}   {yes_no(is_equal)}")
    say(f"losses equal to the last bit on every rank: {yes_no(all(equal.values()))}")
    say(f"parameters after the last step equal to the last bit: {yes_no(same)}")
    return same and all(equal.values())


def print_nearness(one: Run, other: Run) -> bool:
    """True if no loss of `other` in the first CLOSE_STEPS is further from that of `one` than
    CLOSE."""
    ours, theirs = mean_over_ranks(one.losses), mean_over_ranks(other.losses)
    far = {step: abs(theirs[step] / loss - 1) for step, loss in ours.items()}
    early = max(far[step] for step in list(far)[:CLOSE_STEPS])
    worst = max(far, key=far.__getitem__)
    last = len(far) - 1
    say(
        f"{other.name}: loss {theirs[last]:.6f} after {len(far)} steps, {one.name} "
        f"{ours[last]:.6f}; furthest apart at step {worst}, by {far[worst]:.1e}; in the first "
        f"{CLOSE_STEPS} steps by {early:.1e} (at most {CLOSE:g})"
    )
    return early <= CLOSE


def print_costs(*runs: Run) -> None:
    rows = {
        "": [run.name for run in runs],
        "first step": [f"{run.seconds[0] * 1e3:.0f} ms" for run in runs],
        "median of the other steps": [f"{median_ms(run):.1f} ms" for run in runs],
        "gathered bytes at peak, measured": [measured_bytes(run) for run in runs],
        "gathered bytes at peak, planned": [planned_bytes(run) for run in runs],
    }
    say("")
    for title, cells in rows.items():
        say(f"{title:<36}" + "".join(f"{cell:>14}" for cell in cells))


def median_ms(run: Run) -> float:
    return 1e3 * statistics.median(seconds for step, seconds in run.seconds.items() if step > 0)


def measured_bytes(run: Run) -> str:
    # One process gathers nothing: there is no all-gather to look into.
    return f"{run.gathered_peak_bytes:,}" if dist.get_world_size() > 1 else "-"


def planned_bytes(run: Run) -> str:
    plans = graphshard.plans(run.model)
    return f"{plans[0].summary().gathered_peak_bytes:,}" if plans else "-"


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def write_schedule(run: Run, out: Path) -> None:
    """The plan as JSON, and the picture that `graphshard view PLAN.json -o OUT` makes of it."""
    plan = graphshard.plans(run.model)[0]
    if dist.get_rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(plan.to_json())
        out.write_text(html.render(plan), encoding="utf-8")
    say(f"\nwrote {out} and {out.with_suffix('.json')}")


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


# -- the whole ------------------------------------------------------------------------------------


def run_all(job: Job) -> tuple[Run, Run, Run, Run, str]:
    """The run with eager FSDP2, the ones with graphshard, bitwise and by default, the resumed one,
    and a sample of text."""
    eager = start("eager FSDP2", job, compute=None)
    train(eager, job, 0, job.num_steps)

    fused = start("by Inductor", job, compute="inductor")
    train(fused, job, 0, job.num_steps)

    planned = start("graphshard", job)
    resumed = start("resumed", job, seed=SEED + 1)  # its values must come from the checkpoint
    with shared_folder() as folder:
        train(planned, job, 0, job.saved_step)
        save(planned, folder)
        train(planned, job, job.saved_step, job.num_steps)
        load(resumed, folder)
        train(resumed, job, job.saved_step, job.num_steps)
    text = generate(resumed.model, PROMPT, SAMPLE_BYTES, SEED, lambda: job.advance("sample"))
    return eager, planned, fused, resumed, text


def report(job: Job, eager: Run, planned: Run, fused: Run, resumed: Run, text: str) -> bool:
    count = sum(p.numel() for p in planned.model.parameters())
    say(f"{count:,} parameters, {dist.get_world_size()} processes, {job.device}")
    parity = print_losses(eager, planned)
    near = print_nearness(eager, fused)
    print_costs(eager, planned, fused)
    say(f"\n{graphshard.explain(fused.model)}")
    say(f"\nresumed from the checkpoint of step {job.saved_step} in a fresh model:")
    resumes = print_losses(planned, resumed)
    say(f"\nsample of text:\n{text}")
    return parity and near and resumes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with eager FSDP2 and with graphshard.")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--dim", type=int, default=256, help="width, a multiple of 32")
    parser.add_argument("--layers", type=int, default=8, help="number of blocks")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process and step")
    parser.add_argument("--out", type=Path, default=Path("schedule.html"), help="picture to write")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps must be at least 3: a first one, some to time, one to measure")
    return args


def open_mesh() -> DeviceMesh:
    """Join the other processes: with an accelerator for each of them, else on the CPU."""
    device = torch.device("cpu")
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.accelerator.current_accelerator() or device
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        # Bitwise comparisons need kernels that give the same bits every time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def main() -> int:
    args = arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes on stderr
    config = LlamaConfig(args.dim, args.layers, args.seq_len)
    try:
        mesh = open_mesh()
        saved = 2 * args.steps // 3
        with progress(4 * args.steps - saved + SAMPLE_BYTES) as advance:
            job = Job(config, mesh, read_corpus(), args.batch, args.steps, saved, advance)
            eager, planned, fused, resumed, text = run_all(job)
        equal = report(job, eager, planned, fused, resumed, text)
        write_schedule(fused, args.out)
        return 0 if equal else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
