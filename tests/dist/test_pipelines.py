"""Pipeline stages that are sharded and compiled: bits and collectives of eager FSDP2."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_models import mesh_of
from models import DIM, LENGTH, VOCAB, GPTBlock, rng
from parity import Trace, assert_equal, count_collectives, local
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import graphshard

pytestmark = pytest.mark.dist

Counts = tuple[int, int]
PIPES, BATCH, MICRO_BATCHES, STEPS = 2, 8, 4, 2


@dataclass(frozen=True)
class Order:
    """per_rank: stages on a rank. turns: the second half of the stages comes back."""

    kind: Any
    per_rank: int = 1
    turns: bool = False

    @property
    def stages(self) -> int:
        return PIPES * self.per_rank

    def numbers(self, place: int) -> list[int]:
        if self.turns:
            return [place, self.stages - 1 - place]
        return [place + PIPES * turn for turn in range(self.per_rank)]


ORDERS = {
    "GPipe": Order(schedules.ScheduleGPipe),
    "1F1B": Order(schedules.Schedule1F1B),
    "Interleaved1F1B": Order(schedules.ScheduleInterleaved1F1B, 2),
    "LoopedBFS": Order(schedules.ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": Order(schedules.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": Order(schedules.ScheduleZBVZeroBubble, 2, turns=True),
}


class Part(nn.Module):
    """A block of a model, with what comes before and after it at its ends."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if first else nn.Identity()
        self.block = GPTBlock(dropout=0.0)
        self.head = nn.Linear(DIM, VOCAB) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embed(x)))
        return out


def whole_mesh(ctx: Ctx, tensor: int) -> DeviceMesh:
    shape = (PIPES, ctx.world_size // PIPES // tensor, tensor)
    return mesh_of(ctx, shape, "pipe", "data", "tensor")


def parts_of(mesh: DeviceMesh, order: Order, *, reshard: bool) -> dict[int, nn.Module]:
    """This rank's stages by number."""
    found: dict[int, nn.Module] = {}
    for number in order.numbers(mesh.get_local_rank("pipe")):
        torch.manual_seed(number)
        part = Part(first=number == 0, last=number == order.stages - 1)
        if mesh["tensor"].size() > 1:
            ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(part.block.mlp, mesh["tensor"], ways)
        for module in (part.block, part):
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=reshard)
        found[number] = part
    return found


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(
    mesh: DeviceMesh,
    order: Order,
    parts: dict[int, nn.Module],
    *,
    wrap: dict[str, Any] | None = None,
) -> tuple[Trace, list[Counts]]:
    """What training left, and the all-gathers and reduce-scatters of each step."""
    stages = [
        PipelineStage(
            part if wrap is None else torch.compile(part, backend="graphshard", options=wrap),
            number,
            order.stages,
            torch.device("cpu"),
            group=mesh.get_group("pipe"),
        )
        for number, part in parts.items()
    ]
    schedule = order.kind(
        stages if order.per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of
    )
    named = {f"{n}.{name}": p for n, part in parts.items() for name, p in part.named_parameters()}
    optim = torch.optim.SGD(named.values(), lr=0.1)
    trace, counted = Trace(), []
    for step in range(STEPS):
        drawn = rng(step, mesh.get_local_rank("data"))
        text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=drawn)
        inputs = (text[:, :-1],) if 0 in parts else ()
        target = text[:, 1:] if order.stages - 1 in parts else None
        losses: list[Tensor] = []
        with count_collectives() as counts:
            schedule.step(*inputs, target=target, losses=losses)
        counted.append((counts.all_gather, counts.reduce_scatter))
        trace.losses.append(torch.stack(losses) if losses else torch.zeros(()))
        trace.grads.append({name: local(p.grad) for name, p in named.items()})
        optim.step()
        optim.zero_grad()
    trace.params.update((name, local(p)) for name, p in named.items())
    return trace, counted


@dataclass(frozen=True)
class Setting:
    """oracle: the order that eager FSDP2 runs, if not the same one."""

    order: str
    reshard: bool = False
    wrapped: bool = False
    tensor: int = 1
    oracle: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"schedule": "fsdp2"})


@torch._dynamo.config.patch(recompile_limit=64)
def alike(ctx: Ctx, setting: Setting) -> tuple[Counts, Counts]:
    """Bits as in eager FSDP2; its collectives in the last step, and ours.

    In the first one the schedule looks at shapes, and graphshard at the network.
    """
    mesh, order = whole_mesh(ctx, setting.tensor), ORDERS[setting.order]
    options = {"fallback": "error", **setting.options}
    eager = ORDERS[setting.oracle or setting.order]
    expected, theirs = trained(mesh, eager, parts_of(mesh, eager, reshard=setting.reshard))
    parts = parts_of(mesh, order, reshard=setting.reshard)
    for part in parts.values() if not setting.wrapped else ():
        part.compile(backend="graphshard", options=options)
    found, ours = trained(mesh, order, parts, wrap=options if setting.wrapped else None)
    assert_equal(expected, found)
    for part in parts.values():
        report = graphshard.explain(part)
        assert report.captured == report.present > 0
    return theirs[-1], ours[-1]


def both(pool: Pool, setting: Setting, ranks: int = 4) -> list[tuple[Counts, Counts]]:
    """Stages that are alike share a graph, in whatever order they run."""
    return pool.run(ranks, alike, setting, keeps_compiled=True)


@pytest.mark.parametrize("name", ORDERS)
def test_a_stage_is_gathered_once_a_step(pool: Pool, name: str) -> None:
    for theirs, ours in both(pool, Setting(name)):
        assert theirs == ours
        assert ours[0] <= 2 * ORDERS[name].per_rank


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_stages_that_reshard_after_forward(pool: Pool, name: str) -> None:
    for theirs, ours in both(pool, Setting(name, reshard=True)):
        assert theirs == ours


def test_a_backward_in_two_parts_loses_no_gradient_where_eager_loses_some(pool: Pool) -> None:
    """Eager FSDP2 has resharded the weights when the second part looks for them."""
    setting = Setting("InterleavedZeroBubble", reshard=True, oracle="Interleaved1F1B")
    for theirs, ours in both(pool, setting):
        assert theirs[1] == ours[1]


def test_a_stage_that_was_wrapped(pool: Pool) -> None:
    for theirs, ours in both(pool, Setting("1F1B", wrapped=True)):
        assert theirs == ours


def test_the_default_schedule_gathers_no_more_often(pool: Pool) -> None:
    for theirs, ours in both(pool, Setting("GPipe", options={})):
        assert ours[0] <= theirs[0]
        assert ours[1] == theirs[1]


def test_stages_with_tensor_parallel_blocks(pool: Pool) -> None:
    for theirs, ours in both(pool, Setting("1F1B", tensor=2), ranks=8):
        assert theirs == ours
