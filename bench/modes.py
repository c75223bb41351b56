"""What is compared: ways to train one model, each with its own sharding and communication.

In: a mode and a model. Out: a `Trainer`, of which `step` is one whole training step: forward,
backward, optimizer. After it no communication is in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench.models import WithLoss
from graphshard.capture.ports import records_under
from graphshard.step_plan import Estimate


@dataclass(frozen=True, slots=True)
class Mode:
    """reshard: `reshard_after_forward` of the blocks. The root has FSDP2's default everywhere.

    budget: of the planner, from 0 (the measured peak of tuned FSDP2 that reshards) to 1 (that of
    tuned FSDP2 that keeps), `inf` for none. None: the schedule that needs no costs.
    """

    name: str
    title: str
    sharded: bool = True
    tuned: bool = False
    compiled: bool = False
    reshard: bool | None = None
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Planner:
    """What `options` tell graphshard: a hard limit in bytes, and a profile of the machine."""

    budget_bytes: int
    machine: Path


MODES = (
    Mode("single", "one process", sharded=False),
    Mode("fsdp2", "FSDP2, default"),
    Mode("fsdp2_tuned", "FSDP2, tuned, reshard", tuned=True, reshard=True),
    Mode("fsdp2_tuned_keep", "FSDP2, tuned, keep", tuned=True, reshard=False),
    Mode("graphshard", "graphshard, one ahead", compiled=True),
    Mode("graphshard_keep", "graphshard, one ahead, keep", compiled=True, reshard=False),
    Mode("planned_low", "graphshard, low budget", compiled=True, budget=0.0),
    Mode("planned_middle", "graphshard, middle budget", compiled=True, budget=0.5),
    Mode("planned", "graphshard, no limit", compiled=True, budget=math.inf),
)
LOWEST, HIGHEST = "fsdp2_tuned", "fsdp2_tuned_keep"  # between their peaks lie the budgets
NO_LIMIT_BYTES = 10**12
PLANNED = MODES[-1]
WARM_UP_STEPS = 3  # the first one compiles and makes the optimizer's state
PREFETCHED = 2  # groups that tuned FSDP2 gathers ahead


@dataclass(slots=True)
class AsyncReduceScatter:
    """FSDP2's `ReduceScatter` that does not wait, as by default it does on a CPU.

    Right as long as nothing reads or scales the output before `wait`: float32 gradients, averaged
    by the collective, without accumulation.
    """

    pending: list[Any] = field(default_factory=list)

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        work = dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=True
        )
        self.pending.append(work)

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class Trainer:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reductions: AsyncReduceScatter

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(tokens, targets)
        loss.backward()
        self.reductions.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def budget_bytes(mode: Mode, lowest: int, highest: int) -> int | None:
    """Bytes of `mode.budget`, given the two peaks that it lies between."""
    if mode.budget is None:
        return None
    if math.isinf(mode.budget):
        return NO_LIMIT_BYTES
    return lowest + int(mode.budget * (highest - lowest))


def make_trainer(
    mode: Mode, model: WithLoss, mesh: DeviceMesh, planner: Planner | None = None
) -> Trainer:
    """planner: for a mode with a budget."""
    reductions = AsyncReduceScatter()
    if mode.sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=mode.reshard)
        fully_shard(model, mesh=mesh)
    if mode.tuned:
        tune(model, reductions)
    if mode.compiled:
        # The other ranks are emulated: there is nobody to agree with.
        # Ops one by one, as in FSDP2: the losses are compared bit by bit.
        options: dict[str, object] = {"fallback": "error", "verify": "off", "compute": "aten"}
        if planner is not None:
            options |= {"memory_budget": planner.budget_bytes, "machine": planner.machine}
        model.compile(backend="graphshard", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Trainer(model, optimizer, reductions)


def tune(model: Any, reductions: AsyncReduceScatter) -> None:
    """What a user can do by hand: gathers and reductions that overlap with compute.

    FSDP2 overlaps by CUDA streams; on a CPU its default overlaps nothing, so that a comparison
    with the default alone would say little.
    """
    blocks = list(model.model.layers)
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:PREFETCHED])
    model.set_modules_to_backward_prefetch(blocks[: -PREFETCHED - 1 : -1])
    model.set_custom_reduce_scatter(reductions)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + PREFETCHED])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - PREFETCHED) : i][::-1])
        block.set_custom_reduce_scatter(reductions)


def estimate_of(trainer: Trainer) -> Estimate | None:
    """What the planner said of its plan."""
    records = records_under(trainer.model)
    plans = [compiled.plan for record in records for compiled in record.plans.values()]
    return plans[0].estimate if plans else None
