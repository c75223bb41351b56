"""Train a small language model with eager FSDP2 and with graphshard, and compare.

    torchrun --nproc-per-node 2 examples/train.py

With GPUs the processes take one each and talk through NCCL, without they use the CPU and gloo.
What is particular to graphshard is one line: `model.compile(backend="graphshard")`. The rest is a
usual FSDP2 script. It trains three times: with eager FSDP2, with graphshard as it is by default,
where Inductor compiles the kernels, and bit by bit (`compute="aten"`: FSDP2's own kernels). What is
measured and printed stands in `comparison.py`. Exit status 1 if a loss or parameter of the third
run differs from eager FSDP2 by a bit, or a loss of the second by more than rounding explains.
Checkpoints go to a temporary folder, so all processes have to share one machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from comparison import (
    Advance,
    Run,
    compared,
    gathered_peak_bytes,
    print_comparison,
    progress,
    shared_folder,
    write_facts,
    write_schedule,
)
from tiny_llama import LlamaConfig, build, generate
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile

SEED = 20
CORPUS_BYTES = 4_000_000
SAMPLE_BYTES = 60
PROMPT = b"def "


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


# -- the whole ------------------------------------------------------------------------------------


def run_all(job: Job) -> tuple[Run, Run, Run, Run, str]:
    """With eager FSDP2, with graphshard by default and bit by bit, the last one resumed from a
    checkpoint, and a sample of text."""
    eager = start("eager FSDP2", job, compute=None)
    train(eager, job, 0, job.num_steps)

    default = start("graphshard", job, compute="inductor")
    train(default, job, 0, job.num_steps)

    exact = start("bit by bit", job)
    resumed = start("resumed", job, seed=SEED + 1)  # its values must come from the checkpoint
    with shared_folder() as folder:
        train(exact, job, 0, job.saved_step)
        save(exact, folder)
        train(exact, job, job.saved_step, job.num_steps)
        load(resumed, folder)
        train(resumed, job, job.saved_step, job.num_steps)
    text = generate(resumed.model, PROMPT, SAMPLE_BYTES, SEED, lambda: job.advance("sample"))
    return eager, default, exact, resumed, text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with eager FSDP2 and with graphshard.")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--dim", type=int, default=256, help="width, a multiple of 32")
    parser.add_argument("--layers", type=int, default=8, help="number of blocks")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process and step")
    parser.add_argument("--out", type=Path, default=Path("schedule.html"), help="picture to write")
    parser.add_argument("--facts", type=Path, help="write what was compared there, as JSON")
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
            eager, default, exact, resumed, text = run_all(job)
        found = compared(eager, default, exact, resumed)
        print_comparison(found, default, saved, text)
        write_schedule(default, args.out)
        if args.facts is not None:
            write_facts(found, args.facts)
        return 0 if found.holds else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
