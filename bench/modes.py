"""What is compared: ways to train one model, each with its own sharding and communication.

In: a mode and a model. Out: a `Trainer`, of which `step` is one whole training step: forward,
backward, optimizer. After it no communication is in flight.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench import emulator, overlap, peers
from bench.models import WithLoss
from graphshard.capture.root_state import CompiledPlan, root_states_under
from graphshard.compiler import planning_inputs
from graphshard.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Mode:
    """sharding: "", "fsdp2" or "simple_fsdp". compiler: "", "inductor" (all as one graph), "blocks"
    (each by Inductor) or "graphshard".

    tuned: FSDP2 with explicit prefetch of `ahead` groups and asynchronous collectives. reshard: the
    share of the blocks, from the first one, that are resharded after forward, the others are kept;
    None leaves them to FSDP2, as the root always is. explicit: the script says True for blocks that
    are resharded; else it leaves them to FSDP2, which does so. across: between micro-steps all
    stays gathered. within: modes of whose measured peaks the mean is the planner's budget; ANY for
    no limit, none for no planner.
    on_node: the ranks of each node hold the blocks from forward to backward (an int
    `reshard_after_forward`); a planner may decide so. tunes: on the emulated network too, the plan
    is made of the preset's costs, and again of the first steps. compute, schedule: of graphshard.
    bucket_mb: of Inductor's overlap and bucketing passes; None leaves them off. simple_overlap: its
    pass of that name (torch 2.15).
    """

    name: str
    title: str
    sharding: str = "fsdp2"
    compiler: str = ""
    tuned: bool = False
    ahead: int = 2
    reshard: float | None = None
    explicit: bool = True
    across: bool = False
    on_node: bool = False
    tunes: bool = False
    within: tuple[str, ...] = ()
    compute: str = "aten"
    schedule: str = "planned"
    bucket_mb: float | None = None
    simple_overlap: bool = False

    @property
    def is_ours(self) -> bool:
        return self.compiler == "graphshard"

    @property
    def is_peer(self) -> bool:
        """What a careful user of something else gets."""
        return self.tuned or self.sharding == "simple_fsdp"

    @property
    def is_exact(self) -> bool:
        """Its losses are eager FSDP2's to the last bit."""
        return not self.compiler or (self.is_ours and self.compute == "aten")


@dataclass(frozen=True, slots=True)
class Planner:
    """What `options` tell graphshard: a hard limit in bytes, a profile of the machine, micro-steps
    of each step, whether the host may hold activations, who says what is computed again."""

    budget_bytes: int
    machine: Path
    micro_steps: int = 1
    offload: str = "auto"
    recompute: str = "auto"


@dataclass(frozen=True, slots=True)
class Link:
    """The emulated network, for who has to know it."""

    num_ranks: int
    gbit: float
    alpha_us: float


ANY = ("any",)


def ours(name: str, title: str, **more: Any) -> Mode:
    return Mode(name, f"graphshard, {title}", compiler="graphshard", **more)


def fused(name: str, title: str, *within: str, **more: Any) -> Mode:
    return ours(name, f"Inductor, {title}", within=within, compute="inductor", **more)


def by_blocks(suffix: str = "", title: str = "", **more: Any) -> tuple[Mode, ...]:
    """FSDP2 as a careful user has it, that reshards all, half or none of its blocks."""
    shares = {"": ("reshard", 1.0), "_half": ("half", 0.5), "_keep": ("keep", 0.0)}
    return tuple(
        Mode(
            f"blocks_tuned{kept}{suffix}", f"FSDP2, Inductor, {word}{title}", "fsdp2", "blocks",
            tuned=True, reshard=share, **more,
        )
        for kept, (word, share) in shares.items()
    )  # fmt: skip


def simple(suffix: str, title: str, **more: Any) -> Mode:
    return Mode(f"simple_fsdp{suffix}", f"SimpleFSDP{title}", "simple_fsdp", "inductor", **more)


BUCKETS_MB = (1, 2, 4, 8, 16)
MODES = (
    Mode("single", "one process", ""),
    Mode("inductor", "one process, Inductor", "", "inductor"),
    Mode("fsdp2", "FSDP2, default"),
    Mode("fsdp2_tuned", "FSDP2, tuned, reshard", tuned=True, reshard=1.0),
    Mode("fsdp2_tuned_half", "FSDP2, tuned, half", tuned=True, reshard=0.5),
    Mode("fsdp2_tuned_keep", "FSDP2, tuned, keep", tuned=True, reshard=0.0),
    *by_blocks(),
    Mode(
        "blocks_tuned_across",
        "FSDP2, Inductor, keep all",
        "fsdp2",
        "blocks",
        tuned=True,
        reshard=0.0,
        across=True,
    ),
    Mode("fsdp2_tuned_node", "FSDP2, tuned, node", tuned=True, reshard=1.0, on_node=True),
    Mode(
        "blocks_tuned_node", "FSDP2, Inductor, node", "fsdp2", "blocks",
        tuned=True, reshard=1.0, on_node=True,
    ),
    *by_blocks("_one_ahead", ", one ahead", ahead=1),
    *by_blocks("_three_ahead", ", three ahead", ahead=3),
    simple("", ""),
    *(simple(f"_{mb}mb", f", overlap, {mb} MB", bucket_mb=mb) for mb in BUCKETS_MB),
    simple("_simple_overlap", ", simple overlap", simple_overlap=True),
    *(
        simple(
            f"_{mb}mb_simple_overlap", f", overlap, {mb} MB, simple overlap",
            bucket_mb=mb, simple_overlap=True,
        )
        for mb in BUCKETS_MB
    ),
    ours("graphshard", "one ahead", schedule="fsdp2"),
    ours("graphshard_keep", "one ahead, keep", schedule="fsdp2", reshard=0.0),
    ours("planned_low", "low budget", within=("fsdp2_tuned",)),
    ours("planned_middle", "middle budget", within=("fsdp2_tuned_half",)),
    ours("planned", "no limit", within=ANY),
    fused("fused", "default"),
    fused("fused_low", "low", "blocks_tuned"),
    fused("fused_middle", "middle", "blocks_tuned_half"),
    fused("fused_high", "high", "blocks_tuned_keep"),
    fused("fused_between", "half-way", "blocks_tuned", "blocks_tuned_across"),
    fused("fused_across", "keep all", "blocks_tuned_across"),
    fused("fused_free", "no limit", *ANY),
    ours("default", "no options", compute="inductor", tunes=True),
    ours(
        "default_half", "no options, half",
        compute="inductor", tunes=True, reshard=0.5, explicit=False,
    ),
    ours("default_half_said", "no options, half said", compute="inductor", tunes=True, reshard=0.5),
    ours("default_keep", "no options, keep", compute="inductor", tunes=True, reshard=0.0),
    ours("planned_mesh", "node, without", within=("fsdp2_tuned_node",)),
    ours("planned_node", "node", within=("fsdp2_tuned_node",), on_node=True),
    fused("fused_mesh", "node, without", "blocks_tuned_node"),
    fused("fused_node", "node", "blocks_tuned_node", on_node=True),
)  # fmt: skip
# What a peer's best setting is looked for among: one shape, one network, all that can be set.
SWEPT = tuple(
    mode
    for mode in MODES
    if mode.is_peer and mode.compiler and not mode.across and not mode.on_node
    if overlap.HAS_SIMPLE or not mode.simple_overlap
)
NO_LIMIT_BYTES = 10**12
BY_NAME = {mode.name: mode for mode in MODES}
PLANNED = {mode.compute: mode for mode in MODES if mode.within == ANY}
WARM_UP_STEPS = 3  # the first one compiles and makes the optimizer's state
TUNING_STEPS = 16  # after these a plan has settled


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
    """across: what is gathered stays so from one micro-step to the next. syncs: the model can leave
    gradients unreduced until the last of them."""

    model: Any
    optimizer: torch.optim.Optimizer
    reductions: AsyncReduceScatter
    across: bool = False
    syncs: bool = True

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """One micro-step per batch, then the optimizer. Returns the last loss."""
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            if self.syncs and len(batches) > 1:
                self.model.set_requires_gradient_sync(last)
                if self.across:
                    self.model.set_reshard_after_backward(last)
            loss: Tensor = self.model(*batch)
            loss.backward()
        self.reductions.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_trainer(
    mode: Mode,
    model: WithLoss,
    mesh: DeviceMesh,
    link: Link,
    planner: Planner | None = None,
) -> Trainer:
    """planner: for a mode with a budget."""
    reductions = AsyncReduceScatter()
    blocks = list(model.model.layers)
    if mode.sharding == "simple_fsdp":
        peers.simple_fsdp()(model, mesh, mode="fully_shard")
    elif mode.sharding:
        resharded = len(blocks) * (mode.reshard or 0.0)
        for place, block in enumerate(blocks):
            after_forward: bool | int | None = None
            if mode.reshard is not None:
                after_forward = False if place >= resharded else mode.explicit or None
            if mode.on_node and mode.tuned:
                after_forward = int(os.environ["LOCAL_WORLD_SIZE"])
            fully_shard(block, mesh=mesh, reshard_after_forward=after_forward)
        fully_shard(model, mesh=mesh)
    if mode.tuned:
        tune(model, reductions, mode.ahead)
    compile_with(mode, model, blocks, link, planner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Trainer(model, optimizer, reductions, mode.across, mode.sharding == "fsdp2")


def compile_with(
    mode: Mode,
    model: WithLoss,
    blocks: Sequence[nn.Module],
    link: Link,
    planner: Planner | None,
) -> None:
    fullgraph = not model.model.breaks
    if mode.compiler == "blocks":
        for block in blocks:
            block.compile(fullgraph=True)
    elif mode.compiler == "inductor":
        overlap.simple(mode.simple_overlap)
        if mode.bucket_mb is not None:
            overlap.use(link, mode.bucket_mb)
        model.compile(fullgraph=fullgraph)
    elif mode.is_ours:
        options: dict[str, object] = {
            "fallback": "error" if fullgraph else "warn",
            "compute": mode.compute,
            "schedule": mode.schedule,
        }
        if dist.get_backend() == emulator.BACKEND:
            options["verify"] = "off"  # there is nobody to agree with
            if not mode.tunes:
                options["replan_after"] = 0
            if mode.on_node:  # the ranks that this process stands for do agree
                planning_inputs.may_add_process_groups = lambda ballots: True
        if planner is not None:
            options |= {
                "memory_budget": planner.budget_bytes,
                "machine": planner.machine,
                "micro_steps": planner.micro_steps,
                "offload": planner.offload,
                "recompute": planner.recompute,
            }
        model.compile(backend="graphshard", fullgraph=fullgraph, options=options)


def tune(model: Any, reductions: AsyncReduceScatter, ahead: int) -> None:
    """What a user can do by hand: gathers and reductions that overlap with compute.

    FSDP2 overlaps by CUDA streams; on a CPU its default overlaps nothing, so that a comparison
    with the default alone would say little.
    """
    blocks = list(model.model.layers)
    if dist.get_backend() == "gloo":
        # It has no average, and FSDP2 would divide before the reduction is done. AdamW does not
        # depend on the scale of gradients.
        for part in (model, *blocks):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:ahead])
    model.set_modules_to_backward_prefetch(blocks[: -ahead - 1 : -1])
    model.set_custom_reduce_scatter(reductions)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])
        block.set_custom_reduce_scatter(reductions)


def plan_of(trainer: Trainer) -> Plan | None:
    compiled = compiled_of(trainer)
    return None if compiled is None else compiled.plan


def compiled_of(trainer: Trainer) -> CompiledPlan | None:
    records = root_states_under(trainer.model)
    found = [compiled for record in records for compiled in record.plans.values()]
    return found[0] if found else None
