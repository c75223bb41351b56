"""What is compared: ways to train one model, each with its own sharding and communication.

In: a mode and a model. Out: a `Trainer`, of which `step` is one whole training step: forward,
backward, optimizer. After it no communication is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench.models import Llama


@dataclass(frozen=True, slots=True)
class Mode:
    """reshard: `reshard_after_forward` of the blocks. The root has FSDP2's default everywhere."""

    name: str
    title: str
    sharded: bool = True
    tuned: bool = False
    compiled: bool = False
    reshard: bool | None = None


SUBJECT = "graphshard"  # ratios are against this mode
REFERENCE = "fsdp2"  # losses are compared with those of this mode
MODES = (
    Mode("single", "one process", sharded=False),
    Mode("fsdp2", "FSDP2, default"),
    Mode("fsdp2_tuned", "FSDP2, tuned, reshard", tuned=True, reshard=True),
    Mode("fsdp2_tuned_keep", "FSDP2, tuned, keep", tuned=True, reshard=False),
    Mode("graphshard", "graphshard (aten)", compiled=True),
    Mode("graphshard_keep", "graphshard (aten), keep", compiled=True, reshard=False),
)
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
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.reductions.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_trainer(mode: Mode, model: Llama, mesh: DeviceMesh) -> Trainer:
    reductions = AsyncReduceScatter()
    if mode.sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=mode.reshard)
        fully_shard(model, mesh=mesh)
    if mode.tuned:
        tune(model, reductions)
    if mode.compiled:
        model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Trainer(model, optimizer, reductions)


def tune(model: Any, reductions: AsyncReduceScatter) -> None:
    """What a user can do by hand: gathers and reductions that overlap with compute.

    FSDP2 overlaps by CUDA streams; on a CPU its default overlaps nothing, so that a comparison
    with the default alone would say little.
    """
    blocks = list(model.layers)
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:PREFETCHED])
    model.set_modules_to_backward_prefetch(blocks[: -PREFETCHED - 1 : -1])
    model.set_custom_reduce_scatter(reductions)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + PREFETCHED])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - PREFETCHED) : i][::-1])
        block.set_custom_reduce_scatter(reductions)
