"""What a plan says of a group: sizes, dtypes and settings, as plain values."""

from __future__ import annotations

import math

from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.param import FsdpParam
from graphshard.schedule.groups import ExtensionInfo
from graphshard.schedule.plan import GroupInfo, ParamInfo


def describe(group_id: int, group: FsdpGroup) -> GroupInfo:
    """The group as it is sharded now, under the number that a program gives it."""
    params = tuple(_describe_param(param, group.world_size) for param in group.params)
    return GroupInfo(
        id=group_id,
        fqn=name_of(group),
        params=params,
        world_size=group.world_size,
        reshard_after_forward=group.reshard_after_forward,
        gathered_bytes=sum(p.gathered_bytes for p in params),
        reduce_dtype=_reduce_dtype(group),
        reduce_bytes=_reduce_bytes(group),
        replicated=group.replicate_process_group is not None,
        replicas=group.replicas,
    )


def _describe_param(param: FsdpParam, ranks: int) -> ParamInfo:
    extension, grad_numel = param.extension, ranks * param.padded_numel
    return ParamInfo(
        fqn=param.fqn,
        shape=param.size,
        dtype=str(param.dtype).removeprefix("torch."),
        trainable=param.sharded.requires_grad,
        gathered_bytes=ranks * param.sent_numel * param.wire_dtype.itemsize,
        extension=None
        if extension is None
        else ExtensionInfo(extension.held_bytes, grad_numel, grad_numel * param.dtype.itemsize),
    )


def name_of(group: FsdpGroup) -> str:
    return group.fqn or "(root)"


def _reduce_dtype(group: FsdpGroup) -> str:
    dtypes = [p.reduce_dtype for p in group.params if p.sharded.requires_grad]
    names = list(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
    return names[0] if len(names) == 1 else "+".join(names)


def _reduce_bytes(group: FsdpGroup) -> int:
    chosen = [p for p in group.params if p.sharded.requires_grad]
    sizes = [math.prod(p.padded_shard_size) * p.reduce_dtype.itemsize for p in chosen]
    return group.world_size * sum(sizes)
