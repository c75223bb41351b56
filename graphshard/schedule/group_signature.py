"""What FSDP2 itself would send for each group, and where that of several ranks parts.

In: for each rank the `GroupSignature` of its groups. Out: their canonical form, a fingerprint, and
the first difference in words. Eager FSDP2 compares nothing: ranks that differ here hang, abort or
reduce wrong numbers, so no rank may be handed over to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ParamSignature:
    """One parameter. kind: class of its shard, which may have an all-gather of its own.

    dtype: of the shard; gathered_as, reduced_as: on the wire ("": as the gradient comes).
    """

    fqn: str
    size: tuple[int, ...]
    shard_dim: int
    kind: str
    dtype: str
    gathered_as: str
    reduced_as: str
    trained: bool


@dataclass(frozen=True, slots=True)
class GroupSignature:
    """One `fully_shard` group.

    shard_ranks, replica_ranks: global ranks by process group, over all ranks of the mesh.
    divide_factor, sums_only: `set_gradient_divide_factor`, `set_force_sum_reduction_for_comms`.
    reshard: after forward; an int is the size of the smaller group. all_gather, reduce_scatter: who
    runs them. hooked: something runs on the reduced gradients. Prefetch lists: FQNs.
    """

    fqn: str
    shard_ranks: tuple[tuple[int, ...], ...]
    replica_ranks: tuple[tuple[int, ...], ...]
    params: tuple[ParamSignature, ...]
    divide_factor: float | None
    sums_only: bool
    reshard: bool | int
    reshard_after_backward: bool
    unshard_in_backward: bool
    reduces: bool
    all_reduces: bool
    reduces_unused: bool
    all_gather: str
    reduce_scatter: str
    hooked: bool
    forward_prefetch: tuple[str, ...]
    backward_prefetch: tuple[str, ...]


Groups: TypeAlias = tuple[GroupSignature, ...]

# What the difference is called, by field.
_PHRASES = {
    "size": "the size",
    "shard_dim": "the sharded dimension",
    "kind": "the class of the shard",
    "dtype": "the dtype",
    "gathered_as": "the dtype of the all-gather",
    "reduced_as": "the dtype of the reduce-scatter",
    "trained": "requires_grad",
    "shard_ranks": "the ranks it is sharded over",
    "replica_ranks": "the ranks it is replicated on",
    "divide_factor": "the gradient divide factor",
    "sums_only": "set_force_sum_reduction_for_comms",
    "reshard": "reshard_after_forward",
    "reshard_after_backward": "reshard_after_backward",
    "unshard_in_backward": "set_unshard_in_backward",
    "reduces": "set_requires_gradient_sync",
    "all_reduces": "set_requires_all_reduce",
    "reduces_unused": "set_reduce_scatter_unused_params",
    "all_gather": "the custom all-gather",
    "reduce_scatter": "the custom reduce-scatter",
    "hooked": "whether there is an all-reduce hook",
    "forward_prefetch": "the groups to prefetch in forward",
    "backward_prefetch": "the groups to prefetch in backward",
}


def to_text(groups: Sequence[GroupSignature]) -> str:
    """Canonical JSON."""
    return json.dumps([asdict(group) for group in groups], separators=(",", ":"))


def from_text(text: str) -> Groups:
    """Read what `to_text` wrote."""
    return tuple(_group(row) for row in json.loads(text))


def fingerprint(text: str) -> str:
    """SHA-256 of what `to_text` wrote, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def difference(by_rank: Mapping[int, Groups]) -> str | None:
    """The first thing in which the ranks' groups differ, and each rank's value; None if nothing."""
    names = {rank: tuple(group.fqn for group in groups) for rank, groups in by_rank.items()}
    if len(set(names.values())) > 1:
        return f"the groups are {values_by_rank(_parted(names))}"
    for alike in zip(*by_rank.values(), strict=True):
        by_group = dict(zip(by_rank, alike, strict=True))
        found = _in_group(by_group)
        if found is not None:
            return f"group {alike[0].fqn}: {found}"
    return None


def values_by_rank(values: Mapping[int, object]) -> str:
    """Each value with the ranks that have it: "1 on ranks 0, 2; 3 on rank 1"."""
    having: dict[str, list[int]] = {}
    for rank in sorted(values):
        having.setdefault(_shown(values[rank]), []).append(rank)
    return "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in having.items())


def ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _in_group(by_rank: Mapping[int, GroupSignature]) -> str | None:
    names = {rank: tuple(p.fqn for p in group.params) for rank, group in by_rank.items()}
    if len(set(names.values())) > 1:
        return f"the parameters are {values_by_rank(_parted(names))}"
    own = _first_field(by_rank, skipping=("fqn", "params"))
    if own is not None:
        return own
    for alike in zip(*(group.params for group in by_rank.values()), strict=True):
        found = _first_field(dict(zip(by_rank, alike, strict=True)), skipping=("fqn",))
        if found is not None:
            return f"parameter {alike[0].fqn}: {found}"
    return None


def _first_field(
    by_rank: Mapping[int, GroupSignature] | Mapping[int, ParamSignature],
    skipping: tuple[str, ...],
) -> str | None:
    rows: list[GroupSignature | ParamSignature] = [*by_rank.values()]
    for name in (f.name for f in fields(rows[0]) if f.name not in skipping):
        values = {rank: getattr(row, name) for rank, row in by_rank.items()}
        if len(dict.fromkeys(values.values())) > 1:
            return f"{_PHRASES[name]} is {values_by_rank(values)}"
    return None


def _parted(names: Mapping[int, tuple[str, ...]]) -> dict[int, object]:
    """The names that are not everybody's; how many there are where only the order differs."""
    shared = set.intersection(*(set(found) for found in names.values()))
    own = {rank: tuple(n for n in found if n not in shared) for rank, found in names.items()}
    if not any(own.values()):
        return dict(names)
    return {rank: found or "no others" for rank, found in own.items()}


def _shown(value: object) -> str:
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        more = f", ... ({len(value)} in all)" if len(value) > 4 else ""
        return (", ".join(map(str, value[:4])) or "none") + more
    return str(value) or "none"


def _group(row: Mapping[str, object]) -> GroupSignature:
    params = row["params"]
    assert isinstance(params, list)
    rows = (ParamSignature(**{**p, "size": tuple(p["size"])}) for p in params)
    tuples = ("forward_prefetch", "backward_prefetch")
    nested = ("shard_ranks", "replica_ranks")
    values: dict[str, object] = {**row, "params": tuple(rows)}
    values |= {name: tuple(row[name]) for name in tuples}  # type: ignore[arg-type]
    values |= {name: tuple(map(tuple, row[name])) for name in nested}  # type: ignore[call-overload]
    return GroupSignature(**values)  # type: ignore[arg-type]
