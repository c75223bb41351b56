"""What the planner is told of the emulated machine: a profile as `graphshard calibrate` writes.

    python -m bench.profile FOLDER CONFIG RANKS [STEPS]

measures this machine's compute, on the emulated network's own clock (CPU time of one thread): the
kernels of `graphshard calibrate` first, then the step of a model on a network that takes no time,
op by op and by Inductor. Kernels in a step are slower than alone, so all rates move by the ratio of
its time to the prediction, as `observed_compute` does it: one file for each way to compute, and the
pace of the machine meanwhile (`bench.pace`). The network needs no measurement: `with_network` adds
the emulator's exact curves.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import emulator, host_link
from bench.emulator import Nodes
from bench.models import CONFIGS, Config, make_batch, make_model
from bench.modes import (
    NO_LIMIT_BYTES,
    PLANNED,
    WARM_UP_STEPS,
    Link,
    Mode,
    Planner,
    estimate_of,
    make_trainer,
)
from bench.pace import Pace, pace_of
from graphshard.calibrate.calibrate import calibrate
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Fit, Sample, curve_us, line, scaled
from graphshard.cost.profile import CommFit, CostProfile, read_profile

AMOUNTS = (1e4, 1e6)  # bytes; two samples are what a profile needs of a line
FREE_GBIT = 1e6
STEPS = 12


def with_network(
    profile: CostProfile,
    *,
    num_ranks: int,
    gbit: float,
    alpha_us: float,
    nodes: Nodes | None = None,
) -> CostProfile:
    per_node = num_ranks if nodes is None else nodes.ranks_per_node
    comm = _fits(RankGroup(num_ranks, per_node, emulator.BACKEND), gbit, alpha_us)
    if nodes is not None:
        inside = RankGroup(per_node, per_node, emulator.BACKEND)
        comm += _fits(inside, gbit * nodes.faster, alpha_us / nodes.faster)
        one_each = RankGroup(num_ranks // per_node, 1, emulator.BACKEND)
        comm += _fits(one_each, gbit, alpha_us)
    return replace(profile, comm=comm)


def _fits(group: RankGroup, gbit: float, alpha_us: float) -> tuple[CommFit, ...]:
    curve = line(alpha_us, gbit * emulator.BYTES_PER_US_OF_ONE_GBIT)
    samples = tuple(Sample(amount, float(curve_us(curve, amount))) for amount in AMOUNTS)
    return tuple(CommFit(kind, group, Fit(curve, samples)) for kind in CollectiveKind)


def _host_fit(gb_s: float) -> Fit:
    curve = line(host_link.ALPHA_US, gb_s * host_link.BYTES_PER_US_OF_ONE_GB_S)
    samples = tuple(Sample(amount, float(curve_us(curve, amount))) for amount in AMOUNTS)
    return Fit(curve, samples)


def write(
    folder: Path,
    compute: Path,
    *,
    num_ranks: int,
    gbit: float,
    alpha_us: float,
    nodes: Nodes | None = None,
    host_gb_s: float = 0.0,
) -> Path:
    """A profile of one rate of the link, with the compute that was measured into `compute`, and of
    a link to a host if there is one."""
    profile = with_network(
        read_profile(compute), num_ranks=num_ranks, gbit=gbit, alpha_us=alpha_us, nodes=nodes
    )
    if host_gb_s:
        profile = replace(profile, host=_host_fit(host_gb_s))
    path = folder / f"{gbit:g}_gbit.json"
    path.write_text(profile.to_json())
    return path


def moved(profile: CostProfile, ratio: float) -> CostProfile:
    """All compute takes `ratio` times as long. The samples stay as they were measured."""

    def slower(fit: Fit) -> Fit:
        return replace(fit, curve=scaled(fit.curve, ratio, 1 / ratio))

    return replace(
        profile,
        arithmetic=tuple((dtype, slower(fit)) for dtype, fit in profile.arithmetic),
        attention=tuple((dtype, slower(fit)) for dtype, fit in profile.attention),
        memory=slower(profile.memory),
    )


def path_in(folder: Path, compute: str) -> Path:
    return folder / f"{compute}.json"


def pace_in(folder: Path, compute: str) -> float:
    """What a step in plain PyTorch took while compute was measured (us)."""
    found: float = json.loads((folder / f"{compute}_pace.json").read_text())
    return found


def compute_ratio(
    mode: Mode, profile: CostProfile, config: Config, network: Any, pace: Pace, num_steps: int
) -> tuple[float, float]:
    """Measured over predicted time of forward and backward where collectives take no time, and the
    time of a step in plain PyTorch meanwhile."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    free = with_network(profile, num_ranks=num_ranks, gbit=FREE_GBIT, alpha_us=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "free.json"
        path.write_text(free.to_json())
        planner = Planner(NO_LIMIT_BYTES, path)
        link = Link(num_ranks, FREE_GBIT, 0.0)
        trainer = make_trainer(mode, make_model(config, num_ranks), mesh, link, planner)
        times_us, plain_us = [], []
        for step in range(WARM_UP_STEPS + num_steps):
            tokens, targets = make_batch(config, step)
            pace.look()
            plain_us.append(pace.seen_us[-1])
            began_us = network.now_us()
            trainer.model(tokens, targets).backward()
            times_us.append(network.now_us() - began_us)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    estimate = estimate_of(trainer)
    assert estimate is not None
    measured_us, pace_us = (median(times[WARM_UP_STEPS:]) for times in (times_us, plain_us))
    return measured_us / estimate.step_time_us, pace_us


def main() -> None:
    folder, config, num_ranks = Path(sys.argv[1]), CONFIGS[sys.argv[2]], int(sys.argv[3])
    num_steps = int(sys.argv[4]) if len(sys.argv) > 4 else STEPS
    torch.set_num_threads(1)
    network = emulator.join(num_ranks, gbit=FREE_GBIT, alpha_us=0.0)
    pace = pace_of(config, num_ranks)
    alone = calibrate({}, torch.device("cpu"), command=f"python -m bench.profile {sys.argv[1:]}")
    for compute, mode in PLANNED.items():
        torch._dynamo.reset()
        ratio, pace_us = compute_ratio(mode, alone, config, network, pace, num_steps)
        print(f"compute ({compute}) in a step takes {ratio:.3f} times what its kernels take alone")
        path_in(folder, compute).write_text(moved(alone, ratio).to_json())
        (folder / f"{compute}_pace.json").write_text(json.dumps(pace_us))


if __name__ == "__main__":
    main()
