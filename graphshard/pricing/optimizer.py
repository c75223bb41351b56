"""What the optimizer takes of a step and of the memory, group by group.

In: what FSDP2's settings say of each group, a machine and the optimizer. Out: one `OptimizerStep`,
and what is there throughout: shards and what the optimizer keeps of them. Where the host has a
group's shards it also steps them, at the rate of a CPU's preset: of one thread, which is what
torchrun gives each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphshard.cost.machine import Machine
from graphshard.cost.optimizer import Optimizer, Stepped, optimizer_us, state_bytes
from graphshard.cost.presets import preset
from graphshard.fsdp2.settings import GroupSettings
from graphshard.pricing.offload import shard_host
from graphshard.schedule.estimate import Allocation, Category, OptimizerStep

HOST = "cpu"


def optimizer_step(
    settings: Sequence[GroupSettings], machine: Machine, optimizer: Optimizer
) -> OptimizerStep | None:
    """None if nothing is trained."""
    trained = [own for own in settings if own.trainable.numel]
    if not trained:
        return None
    away = [own for own in trained if shard_host(own, machine) is not None]
    here = [own for own in trained if own not in away]
    us = 0.0
    for processor, part in ((machine.processor, here), (preset(HOST).processor, away)):
        if part:
            us += float(optimizer_us(processor, optimizer, _stepped(part)))
    return OptimizerStep(optimizer.kind, optimizer.clips, us)


def resident(
    settings: Sequence[GroupSettings], machine: Machine, optimizer: Optimizer
) -> Iterator[Allocation]:
    """On the device."""
    for number, own in enumerate(settings):
        if shard_host(own, machine) is not None:
            continue
        yield Allocation(Category.SHARDED_PARAM, own.shard_bytes, number)
        kept = state_bytes(optimizer.kind, _stepped([own]))
        yield Allocation(Category.OPT_STATE, int(kept), number)


def _stepped(settings: Sequence[GroupSettings]) -> Stepped:
    return Stepped(
        sum(own.trainable.bytes for own in settings), sum(own.trainable.numel for own in settings)
    )
