"""What the planner is told of the emulated machine: a profile as `graphshard calibrate` writes.

    python -m bench.profile FOLDER CONFIG RANKS [STEPS]

measures this machine's compute, on the emulated network's own clock (CPU time of one thread): the
kernels of `graphshard calibrate` first, then two steps of a model on a network that takes no time,
as planned and with each block computed again, op by op and by Inductor. Kernels in a step are
slower than alone, so rates move: where ops run one by one, those of arithmetic, of launches and of
memory each by what explains the regions of both steps best; where regions are compiled, all by the
ratio of the steps' times to the predictions. One file for each way to compute, and the pace of the
machine (`bench.pace`) at which it was measured. The network needs no measurement: `with_network`
adds the emulator's exact curves.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from bench import emulator, host_link
from bench.clock import measure_on
from bench.emulator import Nodes
from bench.models import CONFIGS, Config, WithLoss, make_batch, make_model
from bench.modes import (
    NO_LIMIT_BYTES,
    PLANNED,
    WARM_UP_STEPS,
    Link,
    Mode,
    Planner,
    Trainer,
    compiled_of,
    make_trainer,
)
from bench.pace import Pace, keep_pace, pace_of
from graphshard.calibrate.calibrate import calibrate
from graphshard.capture.root_state import CompiledPlan
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Fit, Sample, curve_us, line, scaled
from graphshard.cost.profile import CommFit, CostProfile, read_profile
from graphshard.cost.roofline import OpWork
from graphshard.planner.problem import transfers_of
from graphshard.pricing.flops import graph_work
from graphshard.schedule.plan import Plan, StepKind
from graphshard.schedule.steps import ISSUES, WAITS

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


@dataclass(frozen=True, slots=True)
class InStep:
    """How many times what was measured alone something takes in a step: products and attention, a
    launch of another kernel, memory traffic. issue_us, wait_us: of a collective beside its copies,
    as in `Machine`."""

    arithmetic: float
    launch: float
    memory: float
    issue_us: float = 0.0
    wait_us: float = 0.0


def moved(profile: CostProfile, ratios: InStep) -> CostProfile:
    """Compute as it is in a step. The samples stay as they were measured."""

    def slower(fit: Fit) -> Fit:
        return replace(fit, curve=scaled(fit.curve, ratios.arithmetic, 1 / ratios.arithmetic))

    memory = replace(
        profile.memory, curve=scaled(profile.memory.curve, ratios.launch, 1 / ratios.memory)
    )
    return replace(
        profile,
        arithmetic=tuple((dtype, slower(fit)) for dtype, fit in profile.arithmetic),
        attention=tuple((dtype, slower(fit)) for dtype, fit in profile.attention),
        memory=memory,
        issue_us=ratios.issue_us,
        wait_us=ratios.wait_us,
    )


def path_in(folder: Path, compute: str) -> Path:
    return folder / f"{compute}.json"


def pace_in(folder: Path, compute: str) -> float:
    """What a step in plain PyTorch took while compute was measured (us)."""
    found: float = json.loads((folder / f"{compute}_pace.json").read_text())
    return found


def in_step(
    mode: Mode, profile: CostProfile, config: Config, network: Any, pace: Pace, num_steps: int
) -> tuple[InStep, float]:
    """Measured over predicted time of compute where collectives take no time, and the pace at which
    it was measured: the time of a step in plain PyTorch (us)."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    free = with_network(profile, num_ranks=num_ranks, gbit=FREE_GBIT, alpha_us=0.0)
    pace_us = pace.look()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "free.json"
        path.write_text(free.to_json())
        link = Link(num_ranks, FREE_GBIT, 0.0)
        trainers = [
            make_trainer(mode, model, mesh, link, Planner(NO_LIMIT_BYTES, path, recompute=who))
            for model, who in (
                (make_model(config, num_ranks), "auto"),
                (checkpointed(make_model(config, num_ranks)), "user"),
            )
        ]

        def steps(trainer: Trainer, first: int, count: int) -> None:
            for number in range(first, first + count):
                keep_pace(network, pace, pace_us)
                trainer.step([make_batch(config, number)])

        for trainer in trainers:
            steps(trainer, 0, WARM_UP_STEPS)
            with graphshard.profile(trainer.model, steps=num_steps):
                steps(trainer, WARM_UP_STEPS, num_steps)
    runs = [compiled for trainer in trainers if (compiled := compiled_of(trainer)) is not None]
    assert len(runs) == len(trainers)
    if mode.compute != "aten":
        return whole([run.plan for run in runs]), pace_us
    return with_collectives(by_kind(profile, runs), runs), pace_us


def checkpointed(model: WithLoss) -> WithLoss:
    """Each block is computed again in backward."""
    for place, block in enumerate(model.model.layers):
        model.model.layers[place] = checkpoint_wrapper(block)
    return model


def whole(plans: Sequence[Plan]) -> InStep:
    """One ratio for all: of kernels of a compiled region it is not known which take how long."""
    measured_us, predicted_us = 0.0, 0.0
    for plan in plans:
        assert plan.measured is not None
        assert plan.estimate is not None
        measured_us += plan.measured.step_time_us
        predicted_us += plan.estimate.ours.step_time_us
    ratio = measured_us / predicted_us
    return InStep(ratio, ratio, ratio)


def by_kind(profile: CostProfile, runs: Sequence[CompiledPlan]) -> InStep:
    """From what each region of compute took."""
    took_us, alone = [], []
    for run in runs:
        assert run.plan.measured is not None
        for direction, module in run.running.program.by_direction.items():
            works = graph_work(module.graph)
            for segment in run.plan.measured.of(direction):
                if segment.step.kind is StepKind.COMPUTE:
                    took_us.append(segment.us)
                    part = works[segment.step.start : segment.step.stop]
                    alone.append(alone_us(profile, part))
    return fitted(took_us, alone)


def fitted(took_us: Sequence[float], alone: Sequence[Sequence[float]]) -> InStep:
    """The ratios that explain each region best (least squares of errors by the square root of its
    time), and all of them together exactly. alone: a row for each region, see `alone_us`."""
    took, rows = np.array(took_us), np.array(alone)
    weights = 1 / np.sqrt(took + 1.0)
    ratios, _ = nnls(rows * weights[:, None], took * weights)
    ratios *= took.sum() / (rows @ ratios).sum()
    return InStep(*map(float, ratios))


def with_collectives(ratios: InStep, runs: Sequence[CompiledPlan]) -> InStep:
    """With what a collective takes of compute to be issued, and to be waited for and released.

    The copies are left out: they are priced by their bytes, and move as memory does.
    """
    num_issues, issues_us, waits_us = 0, 0.0, 0.0
    for run in runs:
        problem, measured = run.running.problem, run.plan.measured
        assert measured is not None
        found = [segment for d in problem.directions for segment in measured.of(d)]
        issues = [s.us for s in found if s.step.kind in ISSUES]
        waits = [s.us for s in found if s.step.kind in WAITS or s.step.kind is StepKind.RELEASE]
        moves = [t for g in problem.groups for part in g.parts for _, t in transfers_of(g, part)]
        num_issues += len(issues)
        issues_us += sum(issues) - ratios.memory * sum(float(move.before_us) for move in moves)
        waits_us += sum(waits) - ratios.memory * sum(float(move.after_us) for move in moves)
    return replace(
        ratios,
        issue_us=max(0.0, issues_us) / num_issues,
        wait_us=max(0.0, waits_us) / num_issues,
    )


def alone_us(profile: CostProfile, works: Sequence[OpWork]) -> tuple[float, float, float]:
    """What ops take by themselves, by kind, as in `InStep`."""
    attention, products = dict(profile.attention), dict(profile.arithmetic)
    arithmetic, launch, memory = 0.0, 0.0, 0.0
    for work in works:
        if work.flops:
            fit = (products if work.attention is None else attention)[work.dtype]
            arithmetic += float(curve_us(fit.curve, work.flops, work.launches))
        else:
            launch += work.launches * float(profile.memory.curve.base_us)
            memory += float(curve_us(profile.memory.curve, work.bytes, 0))
    return arithmetic, launch, memory


def main() -> None:
    folder, config, num_ranks = Path(sys.argv[1]), CONFIGS[sys.argv[2]], int(sys.argv[3])
    num_steps = int(sys.argv[4]) if len(sys.argv) > 4 else STEPS
    torch.set_num_threads(1)
    network = emulator.join(num_ranks, gbit=FREE_GBIT, alpha_us=0.0)
    measure_on(network)
    pace = pace_of(config, num_ranks)
    command = " ".join(("python -m bench.profile FOLDER", *sys.argv[2:]))
    alone = calibrate({}, torch.device("cpu"), command=command)
    for compute, mode in PLANNED.items():
        torch._dynamo.reset()
        ratios, pace_us = in_step(mode, alone, config, network, pace, num_steps)
        print(f"compute ({compute}) in a step, times what it takes alone: {ratios}")
        path_in(folder, compute).write_text(moved(alone, ratios).to_json())
        (folder / f"{compute}_pace.json").write_text(json.dumps(pace_us))


if __name__ == "__main__":
    main()
