"""The collective signature of a plan: what every rank of a mesh has to issue alike.

In: entries that `Plan.collective_signature` lists. Out: their canonical form, a fingerprint, and
the first place where the signatures of several ranks part. Activation shapes are in none of it, so
ranks with batches of different lengths have one signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from itertools import zip_longest

from graphshard.schedule.group_signature import ranks_text


@dataclass(frozen=True, slots=True)
class SignatureEntry:
    """One collective, in the order of issue.

    direction: "forward" or "backward". kind: "all_gather", "reduce_scatter", "all_reduce" (over the
    replicas) or that of a copy. group: FQN of the group, several that travel together joined by " +
    ". dtype: on the wire; parameters of several dtypes travel as "bytes". size_bytes: of the whole
    bucket, all ranks' parts. on_node: among the ranks of each node only.
    """

    direction: str
    kind: str
    group: str
    dtype: str
    size_bytes: int
    on_node: bool = False

    def __str__(self) -> str:
        what = f"{self.direction} {self.kind} of {self.group}{' on each node' * self.on_node}"
        return f"{what} ({self.dtype}, {self.size_bytes:,} bytes)"


CollectiveSignature = tuple[SignatureEntry, ...]


def to_text(signature: CollectiveSignature) -> str:
    """Canonical JSON: one list per entry, no spaces."""
    rows = [row if row[-1] else row[:-1] for row in map(astuple, signature)]  # on_node is rare
    return json.dumps(rows, separators=(",", ":"))


def from_text(text: str) -> CollectiveSignature:
    """Read what `to_text` wrote. Raises ValueError or TypeError for anything else."""
    return tuple(SignatureEntry(*row) for row in json.loads(text))


def fingerprint(signature: CollectiveSignature) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return hashlib.sha256(to_text(signature).encode()).hexdigest()


def difference(by_rank: Mapping[int, CollectiveSignature]) -> str | None:
    """Where the ranks' signatures first part, and which ranks have what there; None if nowhere."""
    ranks = sorted(by_rank)
    for place, row in enumerate(zip_longest(*(by_rank[rank] for rank in ranks))):
        if len(dict.fromkeys(row)) > 1:
            having: dict[SignatureEntry | None, list[int]] = {}
            for rank, entry in zip(ranks, row, strict=True):
                having.setdefault(entry, []).append(rank)
            parts = [f"{ranks_text(rs)}: {e or 'nothing more'}" for e, rs in having.items()]
            return f"collective {place} is " + "; ".join(parts)
    return None


def same_way(
    by_rank: Mapping[int, CollectiveSignature],
    early: Collection[int] = (),
    *,
    reduces_unused: bool = False,
) -> bool:
    """FSDP2's own hooks could run these together, if they would send the same for each group.

    They gather groups in the order of use, and reduce what has a gradient. early: ranks whose graph
    ends before the call does (a graph break): they go on where they ended, the others have all of
    it. reduces_unused: FSDP2 reduces zeros for what has no gradient.
    """
    if not same_order({rank: _forward_groups(s) for rank, s in by_rank.items()}, early):
        return False
    whole = [rank for rank in by_rank if rank not in early]
    return reduces_unused or len({_reduced(by_rank[rank]) for rank in whole}) <= 1


def same_order(orders: Mapping[int, tuple[str, ...]], early: Collection[int] = ()) -> bool:
    """The ranks use their groups in one order, and only ranks that are `early` fewer of them."""
    longest = max(orders.values(), key=len, default=())
    fits = (longest[: len(order)] if rank in early else longest for rank, order in orders.items())
    return list(fits) == list(orders.values())


def _forward_groups(signature: CollectiveSignature) -> tuple[str, ...]:
    found = [e.group for e in signature if (e.direction, e.kind) == ("forward", "all_gather")]
    return tuple(dict.fromkeys(fqn for group in found for fqn in group.split(" + ")))


def _reduced(
    signature: CollectiveSignature,
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The groups that are reduced, and the bytes of each dtype, however they travel together."""
    entries = [e for e in signature if e.kind == "reduce_scatter"]
    bytes_of: dict[str, int] = {}
    for entry in entries:
        bytes_of[entry.dtype] = bytes_of.get(entry.dtype, 0) + entry.size_bytes
    fqns = {fqn for entry in entries for fqn in entry.group.split(" + ")}
    return tuple(sorted(fqns)), tuple(sorted(bytes_of.items()))
