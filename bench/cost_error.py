"""How far the cost model is off on this machine: predicted against measured, one table.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/cost_error.py

Calibrates the ranks' network and device, then measures what calibration did not see: collectives
of sizes in between, and the forward and backward graph of a small Llama (graphshard.demo) with its
ATen ops run one by one. Prints predictions of the calibrated model and of the preset. Graphs on
one CPU thread are measured in that thread's CPU time, which other load on the machine hardly moves.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import Llama, LlamaConfig, rope_table  # (needs the path above)

from graphshard.calibrate.calibrate import calibrate
from graphshard.calibrate.measure import collective_time_us
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import Machine, collective_us
from graphshard.cost.presets import preset_for
from graphshard.cost.profile import calibrated
from graphshard.cost.roofline import ends_us
from graphshard.pricing.flops import graph_work

SIZES_BYTES = tuple(3 * 2**i for i in (13, 15, 17, 19, 21, 23))  # 24 KiB to 24 MiB
MODEL = LlamaConfig(dim=256, num_layers=8, seq_len=512)
BATCH = 1
ROW = "{:<34}{:>14}{:>14}{:>9}{:>14}{:>9}"


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.group.WORLD
    assert world is not None
    profile = calibrate({"world": world}, device)
    preset = preset_for(profile.origin.device)
    machines = (calibrated(preset, profile), preset)
    rows = [] if world.size() == 1 else collectives(machines, profile.comm[0].group, world, device)
    rows += graphs(machines, device)
    if dist.get_rank() == 0:
        print(f"{profile.origin.device}, {world.size()} ranks, torch {torch.__version__}")
        print(ROW.format("", "measured us", "calibrated us", "error", "preset us", "error"))
        for name, measured_us, *predicted_us in rows:
            cells = [t for p in predicted_us for t in (f"{p:,.0f}", f"{p / measured_us - 1:+.0%}")]
            print(ROW.format(name, f"{measured_us:,.0f}", *cells))
    dist.destroy_process_group()


def collectives(
    machines: tuple[Machine, ...], group: RankGroup, ranks: dist.ProcessGroup, device: torch.device
) -> list[Any]:
    return [
        (
            f"{kind} {size // 1024:,} KiB",
            collective_time_us(kind, size, ranks, device, 25),
            *(collective_us(m, kind, group, size) for m in machines),
        )
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        for size in SIZES_BYTES
    ]


def graphs(machines: tuple[Machine, ...], device: torch.device) -> list[Any]:
    model = Llama(MODEL)
    model.rope = rope_table(MODEL.seq_len, MODEL.head_dim, device)
    model.to(device)
    tokens = torch.randint(0, 256, (BATCH, MODEL.seq_len), device=device)
    seen: list[tuple[fx.Graph, list[float]]] = []
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if one_thread else time.perf_counter

    def timed(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        times: list[float] = []
        seen.append((module.graph, times))

        def call(*args: Any) -> Any:
            start = clock()
            result = module(*args)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((clock() - start) * 1e6)
            return result

        return call

    backend = aot_autograd(
        fw_compiler=timed, bw_compiler=timed, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(12):
        dist.barrier()
        compiled(tokens).float().logsumexp(-1).mean().backward()
    return [
        (
            f"{name} graph, {len(work)} ops",
            median(times[2:]),
            *(float(ends_us(m.processor, work)[-1]) for m in machines),
        )
        for name, (graph, times) in zip(("forward", "backward"), seen, strict=True)
        for work in [graph_work(graph)]
    ]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Your compiler for AOTAutograd")
    main()
