"""Gather in the dtype that compute uses."""

from dataclasses import replace

import torch
from torch import fx

from graphshard.graph.program import Program, cast_dtype, unshard_marks
from graphshard.schedule.plan import GroupInfo, ParamInfo


def fold_casts(program: Program) -> Program:
    """Move a dtype cast of a gathered parameter into the gather.

    Before: `cast(unshard(dtype=a), b)`, as autocast makes it. After: `unshard(dtype=b)`, if every
    use of the parameter is that same floating-point cast; fewer or equal bytes on the wire,
    bitwise the same values, because a cast acts element by element. The groups' planned dtypes
    and bytes follow. No-op otherwise.
    """
    folded: dict[tuple[int, int], torch.dtype] = {}
    for module in program.graphs:
        for mark in unshard_marks(module.graph):
            dtype = _common_cast(mark.node)
            if dtype is None or dtype.itemsize > mark.node.meta["val"].dtype.itemsize:
                continue
            folded[mark.group, mark.index] = dtype
            casts = list(mark.node.users)
            mark.node.update_arg(2, dtype)
            mark.node.meta = {**mark.node.meta, "val": casts[0].meta["val"]}
            mark.node.meta.pop("tensor_meta", None)
            for cast in casts:
                cast.replace_all_uses_with(mark.node)
                module.graph.erase_node(cast)
    if not folded:
        return program
    return program.with_groups(tuple(_with_dtypes(group, folded) for group in program.groups))


def _with_dtypes(group: GroupInfo, folded: dict[tuple[int, int], torch.dtype]) -> GroupInfo:
    params = tuple(
        _with_dtype(param, folded[group.id, index]) if (group.id, index) in folded else param
        for index, param in enumerate(group.params)
    )
    return replace(group, params=params, gathered_bytes=sum(p.gathered_bytes for p in params))


def _with_dtype(param: ParamInfo, dtype: torch.dtype) -> ParamInfo:
    old = getattr(torch, param.dtype)
    size = param.gathered_bytes // old.itemsize * dtype.itemsize
    return replace(param, dtype=str(dtype).removeprefix("torch."), gathered_bytes=size)


def _common_cast(node: fx.Node) -> torch.dtype | None:
    dtypes = {cast_dtype(user) for user in node.users}
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    return dtype if dtype is not None and dtype.is_floating_point else None
