"""What a plan says of a group: sizes, dtypes and settings, as plain values."""

from __future__ import annotations

import math

from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.param import FsdpParam
from graphshard.step_plan import GroupInfo, ParamInfo


def describe(group_id: int, group: FsdpGroup, ranks: int | None = None) -> GroupInfo:
    """The group as it is sharded now, under the number that a program gives it.

    ranks: as it would be over so many; for groups that `FsdpGroup.resizes` only.
    """
    count = group.world_size if ranks is None else ranks
    params = tuple(
        ParamInfo(
            fqn=p.fqn,
            shape=p.size,
            dtype=str(p.dtype).removeprefix("torch."),
            trainable=p.sharded.requires_grad,
            gathered_bytes=count * shard_numel(p, ranks) * p.dtype.itemsize,
        )
        for p in group.params
    )
    return GroupInfo(
        id=group_id,
        fqn=name_of(group),
        params=params,
        world_size=count,
        reshard_after_forward=group.reshard_after_forward,
        gathered_bytes=sum(p.gathered_bytes for p in params),
        reduce_dtype=_reduce_dtype(group),
        reduce_bytes=count * _reduce_bytes(group, ranks),
    )


def name_of(group: FsdpGroup) -> str:
    return group.fqn or "(root)"


def _reduce_dtype(group: FsdpGroup) -> str:
    dtypes = [p.reduce_dtype for p in group.params if p.sharded.requires_grad]
    names = list(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
    return names[0] if len(names) == 1 else "+".join(names)


def shard_numel(param: FsdpParam, ranks: int | None = None) -> int:
    """Elements of one rank's shard with padding; over `ranks` ranks, if there were so many."""
    return math.prod(param.padded_shard_size if ranks is None else param.padded_size_over(ranks))


def _reduce_bytes(group: FsdpGroup, ranks: int | None) -> int:
    """Of one rank's part."""
    chosen = (p for p in group.params if p.sharded.requires_grad)
    return sum(shard_numel(p, ranks) * p.reduce_dtype.itemsize for p in chosen)
